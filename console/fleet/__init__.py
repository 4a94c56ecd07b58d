"""Recipes with which schedulers start a run and the actors that it wants."""
