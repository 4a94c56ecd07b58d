"""Actors: engines, environments, rewards, the episode loop and the weight receiver."""
