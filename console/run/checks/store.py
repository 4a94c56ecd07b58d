"""Checks of the Redis of a run: that it answers, and that it keeps what it is given.

The first line of a check says what holds if it returns. It returns figures for `nyala doctor`.
"""

from __future__ import annotations

from buffer.client.address import without_password
from buffer.client.server_identity import warning_about
from buffer.client.server_state import LEAST_VERSION, ServerState, read_server_state
from buffer.store import Store
from configs.errors import NyalaError, SettingsError
from configs.settings import BufferSettings, RunSettings
from configs.validation.store import memory_shortage
from console.run.redis_server import find_binary

from .check import Check, CheckWarning, sized

GROUP = "Redis"
REACHED = "answers"


def check_redis(run: RunSettings, url: str | None) -> str:
    """The given Redis answers and takes our password, or a server can be started.

    Raises:
        SettingsError: It does not, or no server can be started.
    """
    if url is None:
        return f"none given: the run starts {find_binary()}"
    try:
        with Store(url, run=run.name) as store:
            store.ping()
    except SettingsError:
        raise
    except NyalaError as error:
        raise SettingsError(
            f"buffer.url must be a Redis server that accepts this connection, got: {error}"
        ) from None
    return without_password(url)


def store_checks(run: RunSettings, buffer: BufferSettings, url: str) -> list[Check]:
    """List the checks of a server that answers; `nyala up` only warns of what they find.

    They raise `StoreError` if the server answers no more.
    """

    def check(name: str) -> Check:
        def look() -> str | CheckWarning:
            state = read_server_state(url)
            return LOOKS[name](run, buffer, state)

        return Check(GROUP, name, look, REACHED)

    return [check(name) for name in LOOKS]


def check_version(
    _run: RunSettings, _buffer: BufferSettings, state: ServerState
) -> str | CheckWarning:
    """The server has the commands of the scripts, and no known security holes.

    Raises:
        SettingsError: It is too old.
    """
    server = state.server
    if server is None:
        return CheckWarning(
            "the Redis server should name its version, got none; use Redis or Valkey"
        )
    if server.version[:2] < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise SettingsError(
            f"the Redis server must be Redis {least} or newer, or Valkey, got {server}; update it"
        )
    warning = warning_about(server)
    return str(server) if warning is None else CheckWarning(warning)


def check_policy(_run: RunSettings, _buffer: BufferSettings, state: ServerState) -> str:
    """The server refuses writes when it is full, and never evicts keys.

    Raises:
        SettingsError: It evicts keys.
    """
    if state.policy != "noeviction":
        raise SettingsError(
            f"maxmemory-policy of the Redis server must be noeviction, got {state.policy}, which "
            f"deletes acknowledged episodes; set it with `CONFIG SET maxmemory-policy noeviction`, "
            f"and in its redis.conf"
        )
    return state.policy


def check_durability(_run: RunSettings, _buffer: BufferSettings, state: ServerState) -> str:
    """The server writes what it acknowledges to disk.

    Raises:
        SettingsError: It does not write to disk, or cannot.
    """
    if not state.has_aof:
        raise SettingsError(
            "appendonly of the Redis server must be yes, got no, with which a restart loses "
            "acknowledged episodes; set it with `CONFIG SET appendonly yes`, and in its redis.conf"
        )
    if not state.is_writing:
        raise SettingsError(
            "the Redis server must be able to write its append-only file, got an error at its last "
            "try; look at the disk of its `dir` and at its log"
        )
    return "append-only file on, last write worked"


def check_memory(
    run: RunSettings, buffer: BufferSettings, state: ServerState
) -> str | CheckWarning:
    """The memory of the server holds the episodes of the run, and is not nearly full.

    Raises:
        SettingsError: The batch that actors work for may never fill.
    """
    if not state.limit_bytes:
        return CheckWarning(
            f"maxmemory of the Redis server should be set, got none, with which it grows until the "
            f"machine ends it; set it with `CONFIG SET maxmemory {buffer.maxmemory_mb}mb`"
        )
    if text := memory_shortage(run, buffer, state.limit_bytes):
        raise SettingsError(text)
    figures = f"{sized(state.used_bytes)} of {sized(state.limit_bytes)} used"
    share = state.used_bytes / state.limit_bytes
    if share >= buffer.pause_at_memory:
        return CheckWarning(
            f"the Redis server should be filled below buffer.pause_at_memory = "
            f"{buffer.pause_at_memory}, got {figures}, with which no lease is granted; raise its "
            f"maxmemory, or remove other runs"
        )
    return f"{figures} ({share:.0%})"


LOOKS = {
    "version": check_version,
    "eviction": check_policy,
    "durability": check_durability,
    "memory": check_memory,
}
"""Name of a check -> the function that does it."""
