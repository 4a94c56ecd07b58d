"""Checks of a machine that is to join a run, by the pack that it was given.

What the broker would refuse after minutes of loading is found first: other environments, rewards,
data or packages than the run's, a broker that cannot be reached.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from configs.errors import NyalaError, SettingsError
from console.join_pack.pack import open_pack
from console.run.checks.check import Check
from console.run.run_folder import settings_of

from .implied import sampling_checks

GROUP = "pack"
CONNECT_S = 5.0


def pack_checks(pack: Path, overrides: Sequence[str]) -> list[Check]:
    """List them; a pack that does not open, or is of another run's files, is the only one.

    Args:
        pack: A file of `nyala join-pack`.
        overrides: As typed.
    """
    try:
        folder, changed = open_pack(pack, overrides)
        settings = settings_of(folder, changed)
    except NyalaError as error:
        refusal = error

        def refuse() -> str:
            raise refusal

        return [Check(GROUP, "same as run", refuse)]
    endpoint = settings.broker.endpoint
    return [
        Check(GROUP, "same as run", lambda: f"{settings.run.name}: no hash differs"),
        Check(GROUP, "broker", lambda: check_reached(endpoint)),
        *sampling_checks(settings),
    ]


def check_reached(endpoint: str) -> str:
    """The broker's port takes connections from here.

    Raises:
        SettingsError: It does not.
    """
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_S):
            return f"{endpoint} takes connections"
    except OSError as error:
        raise SettingsError(
            f"broker.endpoint must be reachable from this machine, got {endpoint}: "
            f"{error.strerror or error}; see that the run is up, that a firewall lets this port "
            f"through, and that the address is right"
        ) from None
