"""The store's server in memory, and the real clients of `buffer/store.py` connected to it.

The server runs one script at a time in a fixed moment; to the asyncio client a call takes time on
its way there and back, so that a process can die between a write and its reply. It can be away,
lose replies, and come back as it was some time ago, under another run_id, as after a power loss.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import redis

from buffer.client.errors import explain
from buffer.client.scripts import LoadScript, Script, load_script, make_script
from buffer.client.server_identity import ServerIdentity
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Fetch, ScriptCall
from buffer.store import AsyncStore, Store, incoming
from tests.simulation.event_loop import OUTSIDE, Process, VirtualLoop, current_process
from tests.simulation.lua import Scripts
from tests.simulation.memory_redis import MemoryRedis, Reply
from tests.simulation.network import Trace

HOP_S = 0.0002  # to Redis and back, and its work
AWAY = "Connection refused by the simulation"

Watcher = Callable[[str, tuple[Any, ...], Reply], None]
"""Told the script, its arguments and its reply."""


class Server:
    """A Redis of one run."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        trace: Trace,
        *,
        clock: Callable[[], float],
        scripts: LoadScript = load_script,
    ) -> None:
        self._loop, self._rng, self._trace = loop, rng, trace
        self._load = scripts
        self._names: dict[str, str] = {}
        self._scripts = Scripts(MemoryRedis(clock))
        self.watch: Watcher = lambda *_: None
        self.is_away = False
        self.lost_replies = 0.0
        """Share of calls that are carried out and whose reply is lost."""
        self.on_grant: Callable[[Process | None, int], None] = lambda _broker, _fence: None
        """Called when a broker's LEASE was carried out, and the broker has not heard of it."""
        self.calls: Counter[str] = Counter()
        self.begin_life()

    @property
    def database(self) -> MemoryRedis:
        return self._scripts.database

    @property
    def run_id(self) -> str:
        return self.database.run_id

    def begin_life(self, database: MemoryRedis | None = None) -> None:
        """Start the server, with what an earlier moment had written where that is given."""
        if database is not None:
            self._scripts.database = database
        self.database.run_id = f"{self._rng.getrandbits(160):040x}"

    def load(self, name: str) -> Script:
        """Load a script, and remember its name for those who watch."""
        script = self._load(name)
        self._names[script.sha] = name
        return script

    def check_present(self) -> None:
        """Refuse a connection while the server is away."""
        if self.is_away:
            raise redis.ConnectionError(AWAY)

    def maybe_lose_reply(self) -> None:
        """Let a reply be lost; what was asked for has happened."""
        if self.lost_replies and self._rng.random() < self.lost_replies:
            raise redis.TimeoutError("the reply was lost")

    def answer(
        self,
        script: Script,
        key: str,
        arguments: tuple[Any, ...],
        records: tuple[bytes, ...] = (),
    ) -> Reply:
        """Run a script now."""
        self.check_present()
        name = self._names.get(script.sha, script.sha)
        self.calls[name] += 1
        for place, record in incoming(key, records).items():
            self.database.execute(b"SET", place.encode(), record)
        try:
            reply = self._scripts.run(script, key, arguments)
        except redis.ResponseError as error:
            self._trace.note(name, arguments, str(error))
            raise
        self._trace.note(name, arguments, reply)
        self.watch(name, arguments, reply)
        return reply

    def fetch(self, keys: list[str]) -> Reply:
        """Read strings now."""
        self.check_present()
        self.calls["fetch"] += 1
        return self.database.execute(b"MGET", *map(str.encode, keys))

    async def ask(self, answered: Callable[[], Reply]) -> Reply:
        """Send a call; once sent, it is answered even if whoever asked is no more."""
        process = current_process()
        if process is not None and not process.is_alive:
            raise asyncio.CancelledError
        answer = self._loop.create_future()

        def arrive() -> None:
            try:
                outcome, error = answered(), None
                self.maybe_lose_reply()
            except redis.RedisError as refusal:
                outcome, error = None, refusal
            self._loop.call_later(HOP_S / 2, deliver, outcome, error, context=OUTSIDE)

        def deliver(outcome: Reply, error: redis.RedisError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(outcome)

        self._loop.call_later(HOP_S / 2, arrive, context=OUTSIDE)
        return await answer


class BrokersStore(AsyncStore):
    """The real asyncio client; the last step goes to the server in memory."""

    def __init__(self, server: Server, run: str) -> None:
        super().__init__("redis://simulated", run, scripts=server.load)
        self._server, self._key = server, run_prefix(run)
        self._identity = ServerIdentity(self._key, server.load, admits=lambda *_: True)

    async def _ask(self, call: ScriptCall | Fetch) -> Reply:
        assert isinstance(call, ScriptCall), "brokers fetch nothing"
        if self._identity.trusted != self._server.run_id:
            await self._identity.greet_async(WireOfBroker(self._server))
        asked, script, broker = call, self._scripts(call.script), current_process()

        def answered() -> Reply:
            reply = self._server.answer(script, self._key, asked.arguments, asked.records)
            if asked.script == "lease" and reply[0] == b"OK":
                self._server.on_grant(broker, int(reply[1]))
            return reply

        return await self._server.ask(answered)


class LearnersStore(Store):
    """The real blocking client; an operation takes no time, but its reply may be lost."""

    def __init__(self, server: Server, run: str, trusted: str | None = None) -> None:
        super().__init__("redis://simulated", run, scripts=server.load, admits=lambda *_: False)
        self._server, self._key = server, run_prefix(run)
        if trusted is not None:
            self.trust(trusted)

    def at(self, run_id: str) -> Store:
        return LearnersStore(self._server, self._run, trusted=run_id)

    def server_run_id(self) -> str:
        try:
            self._server.check_present()
        except redis.RedisError as error:
            raise explain(error, "INFO", self._place) from error
        return self._server.run_id

    def _ask(self, call: ScriptCall | Fetch) -> Reply:
        self._greet()
        if isinstance(call, Fetch):
            reply = self._server.fetch([self._key + key for key in call.keys])
        else:
            script = self._scripts(call.script)
            reply = self._server.answer(script, self._key, call.arguments, call.records)
        self._server.maybe_lose_reply()
        return reply

    def _greet(self) -> None:
        if self._identity.trusted != self._server.run_id:
            self._identity.greet(WireOfLearner(self._server))


class WireOfLearner:
    """The part of a Redis connection that `buffer/client/server_identity.py` greets."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reply: Reply = None

    def on_connect(self) -> None:
        """Nothing is said before the greeting."""

    def send_command(self, *command: Any) -> None:
        if command[0] == "INFO":
            self._server.check_present()
            self._reply = self._server.database.execute(b"INFO")
        else:
            _eval, source, _keys, key, *arguments = command
            self._reply = self._server.answer(make_script(source), key, tuple(arguments))

    def read_response(self) -> Reply:
        return self._reply


class WireOfBroker(WireOfLearner):
    """The same for asyncio."""

    async def on_connect(self) -> None:  # type: ignore[override]
        """Nothing is said before the greeting."""

    async def send_command(self, *command: Any) -> None:  # type: ignore[override]
        super().send_command(*command)

    async def read_response(self) -> Reply:
        return self._reply


class View:
    """The reading commands of a Redis client, for `tests/buffer/support/invariants.py`."""

    def __init__(self, database: MemoryRedis) -> None:
        self._database = database

    def __getattr__(self, command: str) -> Callable[..., Any]:
        def ask(*arguments: object) -> Any:
            reply = self._database.execute(command.upper().encode(), *map(_encoded, arguments))
            return reply

        return ask

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        flat: Sequence[bytes] = self._database.execute(b"HGETALL", key.encode())
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def pipeline(self, *, transaction: bool) -> Pipeline:
        return Pipeline(self)


class Pipeline:
    """Commands whose replies are asked for together."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._replies: list[Any] = []

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_error: object) -> None:
        self._replies.clear()

    def __getattr__(self, command: str) -> Callable[..., None]:
        return lambda *arguments: self._replies.append(getattr(self._view, command)(*arguments))

    def execute(self) -> list[Any]:
        return list(self._replies)


def _encoded(argument: object) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()
