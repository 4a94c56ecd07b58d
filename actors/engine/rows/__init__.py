"""Rows of the torch engine: their KV cache and the form of their mask."""
