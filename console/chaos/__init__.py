"""Faults on purpose, on a live run on this machine."""
