"""Checks of settings and machine before a run starts, one file for each thing that is checked."""
