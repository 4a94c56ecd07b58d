"""Metrics of batches, and the files of a run that record them."""
