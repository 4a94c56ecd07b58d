"""Processes of a run: plan, start, watch, restart."""
