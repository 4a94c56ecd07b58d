"""Identity of a Redis server, checked on every connect, before the first operation.

A Redis that was restarted, or replaced after a failover, may have lost its last seconds, which its
replies would not show. Its `run_id` is new in every life of a server, so a client compares it and
confirms a new one: the store then closes leasing and claiming until the learner has re-asserted
what it trained.

    connect --known run_id--> use it
            --new run_id, CONFIRM--> met --`admits` it--> use it
                                         --`admits` not--> StoreRestarted
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import redis
import structlog

from buffer.operations.operation import Argument, Call, Reply
from buffer.operations.run import confirm

from .scripts import LoadScript

# --------------------------------------------------------------------------------------------------
# Known security holes of Redis and Valkey servers, by version.
#
# What Nyala starts itself has none of them. A server that a user names is only warned of: Linux
# distributions mend holes under old version numbers, which nobody can see from outside. Valkey
# calls itself Redis 7.2.4 in `redis_version`, so `server_name` and `valkey_version` decide.

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


# --------------------------------------------------------------------------------------------------
# Identity of a Redis server, checked on every connect, before the first operation.

log = structlog.get_logger()

Admits = Callable[[str, str], bool]
"""(run_id, state of the run) of a server life new to the client -> whether to work with it."""

Greeting = Generator[tuple[Argument, ...], Reply, None]


class NewServerIdentity(redis.ConnectionError):
    """The connection reached a life of the server that the client may not work with yet."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"the server was restarted, its run_id is now {run_id}")
        self.run_id = run_id


class ServerIdentity:
    """The life of the Redis server that one client works with."""

    def __init__(self, prefix: str, scripts: LoadScript, admits: Admits | None) -> None:
        """Start without a trusted life.

        Args:
            prefix: Of the run's keys.
            scripts: Where CONFIRM comes from.
            admits: Decides about every life that is new to this client; None = compare nothing.
        """
        self._prefix = prefix
        self._scripts = scripts
        self.admits = admits
        self.trusted: str | None = None

    def greet(self, connection: Any) -> None:
        """Begin a blocking connection; raises NewServerIdentity to end it instead."""
        connection.on_connect()
        steps, reply = self._greeting(), None
        while True:
            try:
                command = steps.send(reply)
            except StopIteration:
                return
            connection.send_command(*command)
            reply = connection.read_response()

    async def greet_async(self, connection: Any) -> None:
        """Begin an asyncio connection; raises as `greet` does."""
        await connection.on_connect()
        steps, reply = self._greeting(), None
        while True:
            try:
                command = steps.send(reply)
            except StopIteration:
                return
            await connection.send_command(*command)
            reply = await connection.read_response()

    def _greeting(self) -> Greeting:
        if self.admits is None:
            return
        info = _fields((yield ("INFO", "server")))
        run_id = info.get("run_id")
        if run_id is None:
            raise redis.ResponseError("INFO named no run_id")
        if run_id == self.trusted:
            return
        if (warning := warning_about(server_of_info(info))) is not None:
            log.warning(warning)
        state = yield from self._confirm(run_id)
        if not self.admits(run_id, state):
            raise NewServerIdentity(run_id)
        self.trusted = run_id

    def _confirm(self, run_id: str) -> Generator[tuple[Argument, ...], Reply, str]:
        """Run CONFIRM on this very connection, so that no operation comes before it."""
        steps = confirm(run_id).steps()
        reply: Reply = None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as end:
                return str(end.value)
            assert isinstance(call, Call), "CONFIRM fetches nothing"
            source = self._scripts(call.script).source
            reply = yield ("EVAL", source, 1, self._prefix, *call.arguments)


def _fields(info: Reply) -> dict[str, str]:
    """Take an answer to INFO apart."""
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value.strip() for name, _, value in lines}
