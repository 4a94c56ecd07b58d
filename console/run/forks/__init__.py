"""Processes of a run as forks of one that has imported their libraries already."""
