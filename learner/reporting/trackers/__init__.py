"""Experiment trackers: a process that sends what a run writes down to TensorBoard and others."""
