"""The size of a fleet of actors: how many a run wants, and what they cost."""
