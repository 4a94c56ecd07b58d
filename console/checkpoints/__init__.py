"""`nyala checkpoint`: the checkpoints of a run."""
