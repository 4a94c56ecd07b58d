"""The number of episodes that an actor has at a time, and the share of its time they fill."""
