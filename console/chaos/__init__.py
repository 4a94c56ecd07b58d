"""Fault injection on a live run on this machine."""
