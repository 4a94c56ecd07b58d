"""Clients of a run's store: `Store` for threads, `AsyncStore` for an event loop.

Both run the operations of `operations/`. `client/address.py` finds Redis, `client/errors.py`
explains its refusals. Neither client ever sends a call twice: after a lost reply only the caller
can decide whether to repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import redis
from redis import exceptions

from buffer.client.address import (
    connect,
    connect_async,
    disconnect,
    disconnect_async,
    without_password,
)
from buffer.client.connection import PipelinedConnection
from buffer.client.errors import explain
from buffer.client.scripts import LoadScript, load_script
from buffer.client.server_identity import Admits, ServerIdentity
from buffer.operations.keys import incoming_key, run_prefix
from buffer.operations.operation import Argument, Call, Fetch, Operation, Reply

T = TypeVar("T")


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
                then operations raise StoreRestarted. None = with any: for clients that only read.
        """
        self._place = f"run {run!r} at {without_password(url)}"
        self._prefix = run_prefix(run)
        self._scripts = scripts
        self._url, self._run = url, run
        self._identity = ServerIdentity(self._prefix, scripts, admits)
        self._redis = connect(url, redis_connect_func=self._identity.greet)

    def at(self, run_id: str) -> Store:
        """Make another client of the run that works with this life of the server only."""
        other = Store(self._url, self._run, scripts=self._scripts, admits=lambda *_: False)
        other.trust(run_id)
        return other

    def trust(self, run_id: str) -> None:
        """Work with this life of the server from now on."""
        self._identity.trusted = run_id

    def server_run_id(self) -> str:
        """Read which life of the server answers now, whether it is trusted or not."""
        return self._server_info()["run_id"]

    def _server_info(self) -> dict[str, str]:
        client = connect(self._url)
        try:
            return {name: str(value) for name, value in client.info("server").items()}
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
        self._identity = ServerIdentity(self._prefix, scripts, admits=None)
        self._redis = connect_async(url, redis_connect_func=self._identity.greet_async)
        self._connection = PipelinedConnection(self._redis)
        self._records_connection = PipelinedConnection(self._redis)
        """Of its own, so that no other call waits while megabytes of records go out."""

    def watch(self, admits: Admits) -> None:
        """Compare the server's run_id on every connect from now on, as `Store` does by `admits`."""
        self._identity.admits = admits

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
        return await self._ask(("MGET", *(self._prefix + key for key in fetch.keys)))

    async def _call(self, call: Call) -> Reply:
        script = self._scripts(call.script)
        try:
            return await self._evaluate(("EVALSHA", script.sha), call)
        except exceptions.NoScriptError:
            return await self._evaluate(("EVAL", script.source), call)

    async def _evaluate(self, script: tuple[str, str], call: Call) -> Reply:
        command = (*script, 1, self._prefix, *call.arguments)
        if not call.records:
            return await self._ask(command)
        records = (x for pair in incoming(self._prefix, call.records).items() for x in pair)
        *queued, replies = await self._records_connection.ask(
            ("MULTI",), ("MSET", *records), command, ("EXEC",)
        )
        # The error of EXEC names no cause; that of the refused command before it does.
        return _last([*queued, replies] if isinstance(replies, redis.RedisError) else replies)

    async def _ask(self, command: Sequence[Argument]) -> Reply:
        return _last(await self._connection.ask(command))

    async def ping(self) -> None:
        """Fail at once, with a text for people, when Redis cannot be used."""
        try:
            await self._ask(("PING",))
        except redis.RedisError as error:
            raise explain(error, "ping", self._place) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()
        await self._records_connection.close()
        await disconnect_async(self._redis)


def incoming(prefix: str, records: Sequence[bytes]) -> dict[str, bytes]:
    """Name the places where a script looks for the records of its call."""
    return {prefix + incoming_key(i): record for i, record in enumerate(records, start=1)}


def _last(replies: list[Reply]) -> Reply:
    """Return the last reply; raise the first error among them."""
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            raise reply
    return replies[-1]
