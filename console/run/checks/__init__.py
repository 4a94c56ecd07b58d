"""Checks of `preflight.py` that need a file of their own."""
