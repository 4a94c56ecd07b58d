"""Known security holes of Redis and Valkey servers, by version.

What Nyala starts itself has none of them. A server that a user names is only warned of: Linux
distributions mend holes under old version numbers, which nobody can see from outside. Valkey calls
itself Redis 7.2.4 in `redis_version`, so `server_name` and `valkey_version` decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

Version = tuple[int, ...]


class Server(NamedTuple):
    """A server program and its version."""

    name: str
    """`redis` or `valkey`."""
    version: Version

    def __str__(self) -> str:
        return f"{self.name.capitalize()} {'.'.join(map(str, self.version))}"


class Hole(NamedTuple):
    """Holes that were mended together, and the first version without them in each release line."""

    cves: tuple[str, ...]
    redis: tuple[Version, ...]
    valkey: tuple[Version, ...]


HOLES = (
    Hole(
        ("CVE-2024-31228", "CVE-2024-31449"),
        redis=((6, 2, 16), (7, 2, 6), (7, 4, 1)),
        valkey=((7, 2, 7), (8, 0, 1)),
    ),
    Hole(
        ("CVE-2024-46981",),
        redis=((6, 2, 17), (7, 2, 7), (7, 4, 2)),
        valkey=((7, 2, 8), (8, 0, 2)),
    ),
    Hole(  # a client without the password fills the memory
        ("CVE-2025-21605",),
        redis=((6, 2, 18), (7, 2, 8), (7, 4, 3)),
        valkey=((7, 2, 9), (8, 0, 3), (8, 1, 1)),
    ),
    Hole(
        ("CVE-2025-32023", "CVE-2025-48367"),
        redis=((6, 2, 19), (7, 2, 10), (7, 4, 5), (8, 0, 3)),
        valkey=((7, 2, 10), (8, 0, 4), (8, 1, 3)),
    ),
    Hole(
        ("CVE-2025-46817", "CVE-2025-46818", "CVE-2025-46819", "CVE-2025-49844"),
        redis=((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
        valkey=((7, 2, 11), (8, 0, 6), (8, 1, 4)),
    ),
    Hole(
        ("CVE-2026-23479", "CVE-2026-25243"),
        redis=((6, 2, 22), (7, 2, 14), (7, 4, 9), (8, 2, 6), (8, 4, 3), (8, 6, 3)),
        valkey=((7, 2, 13), (8, 0, 9), (8, 1, 7), (9, 0, 4)),
    ),
    Hole(  # Valkey's alone: what Redis mended in the same weeks has no number that we know of
        ("CVE-2026-56684", "CVE-2026-63639"),
        redis=(),
        valkey=((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1)),
    ),
)
"""As the release notes of both projects name them; the newest is of July 2026."""


def holes_of(server: Server) -> tuple[str, ...]:
    """Name the holes of a server, by its version alone."""
    return tuple(
        cve
        for hole in HOLES
        if not _is_mended(server.version, hole.valkey if server.name == "valkey" else hole.redis)
        for cve in hole.cves
    )


def server_of_info(fields: Mapping[str, str]) -> Server | None:
    """Read the fields of INFO; None if they name no version."""
    name = "valkey" if "valkey_version" in fields else "redis"
    version = _version(fields.get(f"{name}_version", ""))
    return Server(name, version) if version else None


def server_of_banner(banner: str) -> Server | None:
    """Read what `redis-server --version` prints; None if it is no such server."""
    found = re.match(r"(Redis|Valkey) server v=(\S+)", banner)
    return Server(found[1].lower(), _version(found[2])) if found else None


def warning_about(server: Server | None) -> str | None:
    """Write what a user should know of a server that they named; None if nothing."""
    holes = holes_of(server) if server is not None else ()
    if not holes:
        return None
    return (
        f"the Redis server should be free of known holes, got {server}, whose number is older "
        f"than the mends of {', '.join(holes)}; update it, or make sure that your distribution "
        f"mended them under this number"
    )


def _version(text: str) -> Version:
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _is_mended(version: Version, mended: tuple[Version, ...]) -> bool:
    """True if the version's line has the mend; lines begun after the last mended one have it."""
    if not mended or version[:2] > mended[-1][:2]:
        return True
    return any(version[:2] == first[:2] and version >= first for first in mended)
