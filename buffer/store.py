"""The store's two clients: `Store` for threads, `AsyncStore` for an event loop.

They own the wording of errors; where Redis is stands in `address.py`, what is asked of it in
`operations/`. Neither ever sends a call twice: after a lost reply only the caller knows
whether to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import redis
from redis import exceptions

from configs.errors import (
    LostLineage,
    StoreError,
    StoreRestarted,
    StoreRewound,
    StoreUnreachable,
)

from .address import connect, connect_async, disconnect, disconnect_async, without_password
from .keys import incoming_key, run_prefix
from .operation import Call, Fetch, Operation, Reply
from .scripts import LoadScript, load_script
from .server_life import Admits, NewServerLife, ServerLife

T = TypeVar("T")

_REFUSALS = {
    "NORUN": "the store must know the run, got no entry for it; begin_run comes first",
    "REWOUND": "the store's lineage must be at least the learner's, got {0}; the store lost writes",
    "COMMITTED": "a claimed batch must be newer than the last committed one, got one <= {0}",
    "SEALED": "units can be dropped only before a batch is sealed; batch {0} is",
    "UNCLAIMED": "a sealed batch must have units, got none in batch {0}",
    "UNSEALED": "only sealed batches are trained and committed; batch {0} is not sealed",
    "TRAINED": "an abandoned batch must not be trained yet, got one <= {0}; weights contain it",
    "UNTRAINED": "a committed batch must be trained, got one > {0}; advance comes first",
    "BACKWARDS": "versions of a lineage must not decrease, got one below {0}",
    "RESTARTED": "the server that was recovered must still answer, got {0}; recover again",
    "DIGEST": "a version must keep its digest; other weights were published as step {0} before",
    "GROUPS": "groups of this run must have {0} tasks; the run began with other settings",
}

_PASSING_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,  # a failover is under way
    exceptions.OutOfMemoryError,  # until the learner commits
)
_PASSING_CODES = re.compile(r"\b(READONLY|OOM|MISCONF|MASTERDOWN|NOREPLICAS) ")
"""What redis-py does not know, or hides in the text of a script's or a transaction's error."""


class Store:
    """A blocking client of one run's store; any thread may use it."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        scripts: LoadScript = load_script,
        admits: Admits | None = None,
    ) -> None:
        """Make the client; nothing is sent before the first operation.

        Args:
            url: Of Redis.
            run: Name of the run.
            scripts: Where Lua comes from.
            admits: Decides whether to work with a server life that is new to this client; until
                then operations raise StoreRestarted. None = with any: for who only looks.
        """
        self._place = f"run {run!r} at {without_password(url)}"
        self._prefix = run_prefix(run)
        self._scripts = scripts
        self._url, self._run = url, run
        self._life = ServerLife(self._prefix, scripts, admits)
        self._redis = connect(url, redis_connect_func=self._life.greet)

    def at(self, run_id: str) -> Store:
        """Make another client of the run that works with this life of the server only."""
        other = Store(self._url, self._run, scripts=self._scripts, admits=lambda *_: False)
        other.trust(run_id)
        return other

    def trust(self, run_id: str) -> None:
        """Work with this life of the server from now on."""
        self._life.trusted = run_id

    def server_run_id(self) -> str:
        """Ask which life of the server answers now, whether it is trusted or not."""
        client = connect(self._url)
        try:
            return str(client.info("server")["run_id"])
        except redis.RedisError as error:
            raise explain(error, "INFO", self._place) from error
        finally:
            disconnect(client)

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out.

        Raises:
            LostLineage: a newer learner owns the run.
            StoreError: Redis refused, or did not answer in time.
        """
        steps = operation.steps()
        reply: Reply = None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                reply = self._fetch(call) if isinstance(call, Fetch) else self._call(call)
            except redis.RedisError as error:
                raise explain(error, operation.name, self._place) from error

    def _fetch(self, fetch: Fetch) -> Reply:
        return self._redis.mget([self._prefix + key for key in fetch.keys])

    def _call(self, call: Call) -> Reply:
        script = self._scripts(call.script)
        try:
            return self._evaluate(("EVALSHA", script.sha), call)
        except exceptions.NoScriptError:
            return self._evaluate(("EVAL", script.source), call)

    def _evaluate(self, script: tuple[str, str], call: Call) -> Reply:
        command = (*script, 1, self._prefix, *call.arguments)
        if not call.records:
            return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.mset(incoming(self._prefix, call.records))
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
            return _last(pipe.execute(raise_on_error=False))

    def ping(self) -> None:
        """Fail at once, with a text for people, when Redis cannot be used."""
        try:
            self._redis.ping()
        except redis.RedisError as error:
            raise explain(error, "ping", self._place) from error

    def close(self) -> None:
        """Close all connections."""
        disconnect(self._redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStore:
    """A client of one run's store for one event loop."""

    def __init__(self, url: str, run: str, *, scripts: LoadScript = load_script) -> None:
        """Make the client; nothing is sent before the first operation."""
        self._place = f"run {run!r} at {without_password(url)}"
        self._prefix = run_prefix(run)
        self._scripts = scripts
        self._life = ServerLife(self._prefix, scripts, admits=None)
        self._redis = connect_async(url, redis_connect_func=self._life.greet_async)

    def watch(self, admits: Admits) -> None:
        """Compare the server's run_id on every connect from now on, as `Store` does by `admits`."""
        self._life.admits = admits

    async def run(self, operation: Operation[T]) -> T:
        """Carry an operation out; raises as `Store.run` does."""
        steps = operation.steps()
        reply: Reply = None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                reply = await (self._fetch(call) if isinstance(call, Fetch) else self._call(call))
            except redis.RedisError as error:
                raise explain(error, operation.name, self._place) from error

    async def _fetch(self, fetch: Fetch) -> Reply:
        return await self._redis.mget([self._prefix + key for key in fetch.keys])

    async def _call(self, call: Call) -> Reply:
        script = self._scripts(call.script)
        try:
            return await self._evaluate(("EVALSHA", script.sha), call)
        except exceptions.NoScriptError:
            return await self._evaluate(("EVAL", script.source), call)

    async def _evaluate(self, script: tuple[str, str], call: Call) -> Reply:
        command = (*script, 1, self._prefix, *call.arguments)
        if not call.records:
            return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.mset(incoming(self._prefix, call.records))
            pipe.execute_command(*command)
            return _last(await pipe.execute(raise_on_error=False))

    async def ping(self) -> None:
        """Fail at once, with a text for people, when Redis cannot be used."""
        try:
            await self._redis.ping()
        except redis.RedisError as error:
            raise explain(error, "ping", self._place) from error

    async def close(self) -> None:
        """Close all connections."""
        await disconnect_async(self._redis)


def incoming(prefix: str, records: Sequence[bytes]) -> dict[str, bytes]:
    """Name the places where a script looks for the records of its call."""
    return {prefix + incoming_key(i): record for i, record in enumerate(records, start=1)}


def _last(replies: list[Reply]) -> Reply:
    """The script's reply, after all that stood before it in the transaction was done."""
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            raise reply
    return replies[-1]


def explain(error: redis.RedisError, operation: str, place: str) -> StoreError:
    """Say what Redis' error means for the operation and what to do about it."""
    text = str(error)
    code, _, detail = text.partition(" ")
    if code == "LOST":
        return LostLineage(
            f"{operation}: {place} belongs to lineage {detail}; this learner must stop"
        )
    if isinstance(error, NewServerLife):
        restarted = StoreRestarted(f"{operation}: {text}; ask again when it is recovered ({place})")
        restarted.run_id = error.run_id
        return restarted
    if code in _REFUSALS:
        refusal = StoreRewound if code in ("NORUN", "REWOUND", "RESTARTED") else StoreError
        return refusal(f"{operation}: {_REFUSALS[code].format(detail)} ({place})")
    kind = StoreUnreachable if _is_away(error) else StoreError
    return kind(f"{operation}: {_reason(error, text)} ({place})")


def _is_away(error: redis.RedisError) -> bool:
    """Whether the same call may succeed in a while, without anybody changing the call."""
    if isinstance(error, exceptions.AuthenticationError):
        return False
    if isinstance(error, _PASSING_ERRORS):
        return True
    return _PASSING_CODES.search(str(error)) is not None


def _reason(error: redis.RedisError, text: str) -> str:
    if isinstance(error, exceptions.AuthenticationError) or "NOAUTH" in text or "WRONGPASS" in text:
        return "Redis refused the password; put the right one into the URL"
    if isinstance(error, exceptions.TimeoutError):
        return "Redis did not answer in time; it may have acted, so look at its load and ask again"
    if isinstance(error, exceptions.BusyLoadingError):
        return "Redis is still loading its data; ask again in some seconds"
    if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in text:
        return "Redis is a read-only replica; point the URL to the primary"
    if "MISCONF" in text:
        return "Redis cannot save its data and takes no writes; look at its disk and its log"
    if isinstance(error, exceptions.NoPermissionError) or any(
        words in text for words in ("NOPERM", "user executing the script", "ACL failure")
    ):
        return f"Redis' access rules refuse this user ({text}); see configs/deploy/redis-users.acl"
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text:
        return "Redis is full; raise its maxmemory or let the learner checkpoint and commit"
    if isinstance(error, exceptions.ConnectionError):
        return f"Redis cannot be reached ({text}); start it or correct the URL"
    return f"Redis refused ({text})"
