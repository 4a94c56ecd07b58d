"""Faults of the matrix, one module per kind, and the tools that make them."""
