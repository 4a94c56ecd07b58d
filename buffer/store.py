"""Clients of a run's store: `Store` for threads, `AsyncStore` for an event loop.

Both run the operations of `operations/`. `client/address.py` finds Redis, `client/errors.py`
explains its refusals. Neither client ever sends a call twice: after a lost reply only the caller
can decide whether to repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

import redis
from redis import exceptions

from buffer.client.address import (
    connect,
    connect_async,
    disconnect,
    without_password,
)
from buffer.client.connection import Connections
from buffer.client.errors import asking, explain
from buffer.client.scripts import LoadScript, load_script
from buffer.client.server_identity import Admits, ServerIdentity
from buffer.operations.keys import incoming_key, run_prefix
from buffer.operations.operation import Fetch, Operation, Reply, ScriptCall

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
            url: URL of Redis.
            run: Name of the run.
            scripts: Returns Lua scripts by name.
            admits: Decides whether to work with a server life that is new to this client; until
                then operations raise StoreRestarted. None = any life, for clients that only read.

        Raises:
            SettingsError: The URL is none of Redis.
        """
        self._place = f"run {run!r} at {without_password(url)}"
        self._prefix = run_prefix(run)
        self._scripts = scripts
        self._url, self._run = url, run
        self._identity = ServerIdentity(self._prefix, scripts, admits)
        self._client = connect(url, redis_connect_func=self._identity.greet)

    def at(self, run_id: str) -> Store:
        """Make another client, which the caller closes, for this life of the server only."""
        other = Store(self._url, self._run, scripts=self._scripts, admits=lambda *_: False)
        other.trust(run_id)
        return other

    def trust(self, run_id: str) -> None:
        """Work with this life of the server from now on."""
        self._identity.trusted = run_id

    def server_run_id(self) -> str:
        """Read the run_id of the server that answers now, whether it is trusted or not.

        Raises:
            StoreError: Redis refused or cannot be reached.
        """
        with asking(self._url, "INFO", self._place) as client:
            return str(client.info("server")["run_id"])

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out, and return its value.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: Redis refused, or did not answer in time; its subclasses say what helps.
        """
        try:
            return operation.carry_out(self._ask)
        except redis.RedisError as error:
            raise explain(error, operation.name, self._place) from error

    def _ask(self, call: ScriptCall | Fetch) -> Reply:
        if isinstance(call, Fetch):
            return self._client.mget([self._prefix + key for key in call.keys])
        script = self._scripts(call.script)
        try:
            return self._evaluate(("EVALSHA", script.sha), call)
        except exceptions.NoScriptError:
            return self._evaluate(("EVAL", script.source), call)

    def _evaluate(self, script: tuple[str, str], call: ScriptCall) -> Reply:
        command = (*script, 1, self._prefix, *call.arguments)
        if not call.records:
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        with self._client.pipeline(transaction=True) as pipe:
            pipe.mset(incoming(self._prefix, call.records))
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
            return _last(pipe.execute(raise_on_error=False))

    def ping(self) -> None:
        """Raise an error for people at once if Redis cannot be used."""
        try:
            self._client.ping()
        except redis.RedisError as error:
            raise explain(error, "ping", self._place) from error

    def close(self) -> None:
        """Close all connections of the client."""
        disconnect(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStore:
    """A client of one run's store for one event loop."""

    def __init__(self, url: str, run: str, *, scripts: LoadScript = load_script) -> None:
        """Make the client; nothing is sent before the first operation. Raises as `Store` does."""
        self._place = f"run {run!r} at {without_password(url)}"
        self._prefix = run_prefix(run)
        self._scripts = scripts
        self._identity = ServerIdentity(self._prefix, scripts, admits=None)
        greet = self._identity.greet_async
        self._connections = Connections(connect_async(url, redis_connect_func=greet))

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
                reply = await self._ask(call)
            except redis.RedisError as error:
                raise explain(error, operation.name, self._place) from error

    async def _ask(self, call: ScriptCall | Fetch) -> Reply:
        if isinstance(call, Fetch):
            keys = (self._prefix + key for key in call.keys)
            return _last(await self._connections.calls.execute_commands(("MGET", *keys)))
        script = self._scripts(call.script)
        try:
            return await self._evaluate(("EVALSHA", script.sha), call)
        except exceptions.NoScriptError:
            return await self._evaluate(("EVAL", script.source), call)

    async def _evaluate(self, script: tuple[str, str], call: ScriptCall) -> Reply:
        command = (*script, 1, self._prefix, *call.arguments)
        if not call.records:
            return _last(await self._connections.calls.execute_commands(command))
        records = (x for pair in incoming(self._prefix, call.records).items() for x in pair)
        *queued, replies = await self._connections.records.execute_commands(
            ("MULTI",), ("MSET", *records), command, ("EXEC",)
        )
        # The error of EXEC names no cause; that of the refused command before it does.
        return _last([*queued, replies] if isinstance(replies, redis.RedisError) else replies)

    async def ping(self) -> None:
        """Raise an error for people at once if Redis cannot be used."""
        try:
            _last(await self._connections.calls.execute_commands(("PING",)))
        except redis.RedisError as error:
            raise explain(error, "ping", self._place) from error

    async def close(self) -> None:
        """Close all connections of the client."""
        await self._connections.close()


def incoming(prefix: str, records: Sequence[bytes]) -> dict[str, bytes]:
    """Return the records of a call by the keys under which its script looks for them."""
    return {prefix + incoming_key(i): record for i, record in enumerate(records, start=1)}


def _last(replies: list[Reply]) -> Reply:
    """Return the last reply; raise the first error among them."""
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            raise reply
    return replies[-1]
