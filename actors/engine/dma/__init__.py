"""Weights that a card copies out of shared memory by itself."""
