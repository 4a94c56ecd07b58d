"""Environment variables by which a launcher lets a rank find the others."""

from __future__ import annotations

RENDEZVOUS_FILE = "NYALA_RENDEZVOUS_FILE"
"""Path of the file through which the ranks of one machine meet."""
RENDEZVOUS_ADDRESS = "NYALA_RENDEZVOUS_ADDRESS"
"""`host:port` of the store through which the ranks of several machines meet."""
RENDEZVOUS_SOCKET = "NYALA_RENDEZVOUS_SOCKET"
"""Of rank 0 alone: the descriptor of that store's socket, which listens already."""
