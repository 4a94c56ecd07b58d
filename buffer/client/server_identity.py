"""Identity of a Redis server, checked on every connect; releases of Redis and Valkey that are safe.

A Redis that was restarted, or replaced after a failover, may have lost its last seconds, which its
replies would not show. Its `run_id` is new in every life of a server, so a client compares it and
confirms a new one: the store then closes leasing and claiming until the learner has restored the
batches that it trained.

    connect --known run_id--> use it
            --new run_id, CONFIRM--> met --`admits` it--> use it
                                         --`admits` not--> StoreRestarted

`admits` is the decision of a broker or the learner; clients that only read have none. The checks
before a start warn of releases that are not safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import redis
import structlog

from buffer.operations.operation import Argument, Reply, ScriptCall
from buffer.operations.run import confirm

from .scripts import LoadScript

# --------------------------------------------------------------------------------------------------
# Least version of Redis and Valkey servers that is used without a warning.
#
# A server that Nyala starts itself is at least that new. For an older server of the user there is
# only a warning: Linux distributions mend holes under old version numbers, which cannot be seen
# from outside. Valkey's `redis_version` is 7.2.4, so `server_name` and `valkey_version` decide.

Version = tuple[int, ...]


class Server(NamedTuple):
    """A server program and its version."""

    name: str
    """`redis` or `valkey`."""
    version: Version

    def __str__(self) -> str:
        return f"{self.name.capitalize()} {'.'.join(map(str, self.version))}"


SAFE_FROM: Mapping[str, Version] = {
    "redis": (8, 6, 3),  # of May 2026: mends CVE-2026-23479 and CVE-2026-25243
    "valkey": (9, 1, 1),  # of July 2026: mends CVE-2026-56684 and CVE-2026-63639
}
"""First version of the newest release line with all fixes that were known when this was written.

Older release lines have fixes of their own; an entry for each would have to follow every advisory.
"""

SAFE = " or ".join(f"{name.capitalize()} {'.'.join(map(str, v))}" for name, v in SAFE_FROM.items())


def is_safe(server: Server) -> bool:
    """Whether a server is new enough, by its version alone."""
    return server.version >= SAFE_FROM[server.name]


def server_of_info(fields: Mapping[str, str]) -> Server | None:
    """Read the server from the fields of INFO; None if they have no version."""
    name = "valkey" if "valkey_version" in fields else "redis"
    version = _version(fields.get(f"{name}_version", ""))
    return Server(name, version) if version else None


def server_of_banner(banner: str) -> Server | None:
    """Read the server from the output of `redis-server --version`; None for other text."""
    match = re.match(r"(Redis|Valkey) server v=(\S+)", banner)
    return Server(match[1].lower(), _version(match[2])) if match else None


def warning_about(server: Server | None) -> str | None:
    """Return the warning about an old server of the user, or None."""
    if server is None or is_safe(server):
        return None
    return (
        f"the Redis server should be at least {SAFE}, got {server}, which may have known holes; "
        f"update it, or make sure that whoever packaged it has mended them"
    )


def _version(text: str) -> Version:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


# --------------------------------------------------------------------------------------------------
# Identity of a Redis server, checked on every connect, before the first operation.

log = structlog.get_logger()

Admits = Callable[[str, str], bool]
"""Decides by (run_id, state of the run) whether to work with a server life new to the client."""

Greeting = Generator[tuple[Argument, ...], Reply, None]


class NewServerIdentity(redis.ConnectionError):
    """The connection reached a life of the server that the client may not use yet."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"the server was restarted, its run_id is now {run_id}")
        self.run_id = run_id


class ServerInClusterMode(redis.ResponseError):
    """The server is a node of Redis Cluster, which may hand a run's keys to another node."""


class ServerIdentity:
    """The life of the Redis server that one client works with."""

    def __init__(self, prefix: str, scripts: LoadScript, admits: Admits | None) -> None:
        """Start without a trusted life.

        Args:
            prefix: Prefix of the run's keys.
            scripts: Returns the script CONFIRM.
            admits: Decides about every life that is new to this client; None = use any.
        """
        self._prefix = prefix
        self._scripts = scripts
        self.admits = admits
        self.trusted: str | None = None

    def greet(self, connection: Any) -> None:
        """Begin a blocking connection, or raise an error that ends it.

        With `admits`, a life of the server that is new to the run sets the run to RECOVERING.

        Raises:
            NewServerIdentity: `admits` does not let this life of the server be used.
            ServerInClusterMode: The server is a node of a cluster.
            redis.RedisError: The server refused the greeting.
        """
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
        info = _fields((yield ("INFO", "server")))
        if "cluster" in (info.get("redis_mode"), info.get("server_mode")):  # Redis', Valkey's name
            raise ServerInClusterMode
        if self.admits is None:
            return
        run_id = info.get("run_id")
        if run_id is None:
            raise redis.ResponseError("INFO must return a run_id, got none")
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
            assert isinstance(call, ScriptCall), "CONFIRM fetches nothing"
            source = self._scripts(call.script).source
            reply = yield ("EVAL", source, 1, self._prefix, *call.arguments)


def _fields(info: Reply) -> dict[str, str]:
    """Return the fields of an answer to INFO."""
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value.strip() for name, _, value in lines}
