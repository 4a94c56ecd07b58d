"""Layers whose matrices are divided over ranks."""
