"""Addresses of servers as others reach them."""

from __future__ import annotations

import ipaddress
import socket

from configs.errors import SettingsError


def reachable(endpoint: str) -> str:
    """Return an endpoint for others; for `0.0.0.0`, that which outward packets come from.

    Raises:
        SettingsError: No packets go outward.
    """
    host, port = host_and_port(endpoint)
    if ipaddress.ip_address(host).is_unspecified:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
                outward.connect(("192.0.2.1", 9))  # for documentation; connecting sends nothing
                host = outward.getsockname()[0]
        except OSError as error:
            raise SettingsError(
                f"a server at {endpoint} must have a default route to find its own address, got: "
                f"{error}; listen at an address of this machine instead or, for a broker or the "
                f"learner, name the one by which others reach it (broker.advertise, "
                f"learner.advertise)"
            ) from error
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def advertised(endpoint: str, address: str) -> str:
    """Return an endpoint under another host, or host and port.

    Args:
        endpoint: The one that is listened at.
        address: `host` or `host:port`, IPv6 in brackets.
    """
    host, _, port = address.rpartition(":")
    if not host or port.endswith("]"):
        host, port = address, str(host_and_port(endpoint)[1])
    return f"tcp://{host}:{port}"


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
