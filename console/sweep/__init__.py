"""Runs of one settings file with several values: `nyala sweep`."""
