"""Processes of a run: planned, started, watched, restarted."""
