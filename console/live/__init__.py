"""A run as it happens: its logs, and its end on request."""
