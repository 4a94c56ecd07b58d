"""Checks between settings of different tables."""
