"""Addresses of metrics, `http://HOST:PORT`: taken apart, and one for each actor of a machine."""

from __future__ import annotations

from urllib.parse import urlsplit

TARGETS = "metrics"
"""Folder of a run with the addresses at which its processes serve."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Take an address apart."""
    parts = urlsplit(endpoint)
    return parts.hostname or "", parts.port or 0


def endpoint_of(endpoint: str, number: int) -> str:
    """Return the address of actor `number` of a machine: so many ports on; port 0 stays."""
    host, port = host_and_port(endpoint)
    if not port:
        return endpoint
    return f"http://{f'[{host}]' if ':' in host else host}:{port + number}"
