"""Sampled texts for a person to read: what a run keeps, and answers of its newest model."""
