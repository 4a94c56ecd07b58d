"""A run on other machines as its broker describes it to an observer: no files, no sampled text."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from broker.client.client import BrokerClient
from broker.protocol.messages import StatusReply
from broker.transport.keys import load_pair, load_public
from buffer.operations.values import ActorSeen
from configs.errors import DeadlineError, SettingsError
from configs.worker import Worker
from console.display.display import IdleTime
from console.display.progress import progress_of
from console.display.snapshot import Fill, View
from learner.reporting.bulletin import Bulletin

LOOK_EVERY_S = 1.0
DEADLINE_S = 10.0  # of one look; the next one begins at once
ALARM_S = 60.0  # as `console.alarm_s`, which is on the other machine
ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run's broker is: `tcp://HOST:PORT/RUN`."""

    endpoint: str
    run: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read it.

        Raises:
            SettingsError: It is no such address.
        """
        parts = urlsplit(text)
        run = parts.path.strip("/")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "tcp" or not parts.hostname or port is None or not run or "/" in run:
            raise SettingsError(
                f"RUN must be the folder of a run, or tcp://HOST:PORT/NAME of its broker, got "
                f"{text}; the port is that of broker.endpoint, the name that of run.name"
            )
        return cls(f"tcp://{parts.netloc}", run)


class RemoteRun:
    """Asks a broker for the state of its run.

    A thread of its own asks, so that a broker that is away does not hold up the view.
    """

    def __init__(self, address: Address, key: Path) -> None:
        """Read the keys; nothing is sent yet.

        Args:
            address: Of the broker.
            key: The observer's secret key, with the broker's public key beside it as `broker.pub`.

        Raises:
            SettingsError: A key is missing or readable by others.
        """
        if key.suffix != ".key":
            raise SettingsError(
                f"--key must be a file such as ana.key, got {key}; make one with `nyala keys add "
                f"ana --role observer --in RUN`, and copy broker.pub beside it"
            )
        self.name = address.run
        self._address = address
        self._keys = load_pair(key.parent, key.stem)
        self._server_key = load_public(key.parent, "broker")
        self._newest: tuple[StatusReply, float] | None = None
        self._away = "nobody has answered yet"
        self._stop = threading.Event()
        self._worker = Worker(lambda: asyncio.run(self._ask()), name="observer")
        self._idle = IdleTime(ALARM_S)
        self._worker.start()

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self._newest is not None and self._newest[0].state == ENDED

    def look(self) -> View:
        """Describe the run as it was when the broker last answered.

        Raises:
            RefusedError: The broker refuses this key, or serves another run.
        """
        self._worker.check()
        if self._newest is None:
            stages = {self._address.endpoint: self._away}
            return View(progress_of(Bulletin(), steps=0), stages, 0, is_training=False)
        reply, at = self._newest
        bulletin = Bulletin.decode(reply.bulletin) if reply.bulletin else Bulletin()
        progress = progress_of(bulletin, steps=reply.steps)
        silent_s = time.monotonic() - at
        alarm = self._idle.alarm(reply.idle or None, reply.version)
        if silent_s > DEADLINE_S:
            alarm = f"the broker has not answered for {silent_s:.0f} s: {self._away}"
        return View(
            progress,
            {"broker": f"the run is {reply.state}", "learner": "no batch yet"},
            sum(actor.silent_s <= reply.silent_after_s for actor in reply.seen),
            is_training=progress.step > 0,
            alarm=alarm,
            actors=tuple(ActorSeen(a.incarnation, a.silent_s, a.fields) for a in reply.seen),
            silent_after_s=reply.silent_after_s,
            fill=Fill(**reply.groups, memory=reply.memory) if reply.groups else None,
            closed=reply.closed,
        )

    def close(self) -> None:
        """End the thread after its present look."""
        self._stop.set()

    async def _ask(self) -> None:
        client = BrokerClient(
            self._address.endpoint,
            server_key=self._server_key,
            keys=self._keys,
            run=self._address.run,
            incarnation=f"observer-{secrets.token_hex(4)}",
        )
        try:
            while not self._stop.is_set():
                try:
                    self._newest = await client.status(deadline_s=DEADLINE_S), time.monotonic()
                except DeadlineError as error:
                    self._away = str(error)
                    continue
                await asyncio.to_thread(self._stop.wait, LOOK_EVERY_S)
        finally:
            await client.close()
