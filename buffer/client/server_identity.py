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

from collections.abc import Callable, Generator
from typing import Any

import redis
import structlog

from buffer.operations.operation import Argument, Call, Reply
from buffer.operations.recovery import confirm

from .known_holes import server_of_info, warning_about
from .scripts import LoadScript

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
