"""Rows of the torch engine: requests, their KV cache, mask and random numbers."""
