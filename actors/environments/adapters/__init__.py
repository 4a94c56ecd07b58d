"""Environments written for other projects, taken as they are."""
