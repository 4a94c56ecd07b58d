"""Rendezvous of ranks: environment variables by which a launcher lets a rank find the others."""

from __future__ import annotations

from collections.abc import Mapping

RENDEZVOUS_FILE = "NYALA_RENDEZVOUS_FILE"
"""Path of the file through which the ranks of one machine meet."""
RENDEZVOUS_ADDRESS = "NYALA_RENDEZVOUS_ADDRESS"
"""`host:port` of the store through which the ranks of several machines meet."""
RENDEZVOUS_SOCKET = "NYALA_RENDEZVOUS_SOCKET"
"""Descriptor of that store's socket, which listens already; only rank 0 has it."""
LAUNCHER_SET = "NYALA_LAUNCHER_SET"
"""Names of the variables that the launcher chose for its ranks, with commas between them."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables for the network interfaces of gloo and NCCL."""


def interfaces(ours: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks that meet on this interface.

    Those of `INTERFACES` that a person has set are left out, so that they stay. `LAUNCHER_SET`
    lists the others, which `without_launchers` takes away again.
    """
    chosen = [name for name in INTERFACES if name not in environment]
    return dict.fromkeys(chosen, ours) | {LAUNCHER_SET: ",".join(chosen)}


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the interfaces that a launcher chose.

    It is for a process that has to reach more than the other ranks. What a person has set stays.
    """
    chosen = environment.get(LAUNCHER_SET, "").split(",")
    return {name: text for name, text in environment.items() if name not in (*chosen, LAUNCHER_SET)}
