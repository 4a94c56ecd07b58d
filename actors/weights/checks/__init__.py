"""Checks of the weights that an engine serves."""
