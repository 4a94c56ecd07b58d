"""Metrics and the files that people read."""
