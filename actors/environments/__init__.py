"""Environments: prompts, steps and scores."""
