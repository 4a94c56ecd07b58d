"""Reward functions, each in a process of its own."""
