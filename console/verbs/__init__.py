"""Verbs of `nyala`, one module per family."""
