"""Environments in a process and a Python of their own."""
