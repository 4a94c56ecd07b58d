"""Waits for an engine: answers with a deadline, the end of its process, its silence."""
