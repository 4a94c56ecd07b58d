"""Which actors a run has, its own and those that joined, from the store; and what the dead leave.

    our own actor's process ends -> the leases of its incarnation are taken back at once

Asks in a thread of its own: a Redis that does not answer must not hold up the supervision. Of an
actor on another machine nobody here sees the end: its leases expire.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterable

from buffer import operations
from buffer.operations.values import ActorSeen
from buffer.store import Store
from configs.errors import NyalaError
from configs.settings import Settings

LOOK_EVERY_S = 2.0
NOBODY = 0  # no process has this id


class Crew:
    """Counts the actors that gave a sign of life within `broker.heartbeat_timeout_s`.

    Example:
        crew = Crew(settings, url)
        crew.start()
        print(crew.alive)
        crew.mourn(4711)
        crew.close()
    """

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        self._deaths: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._alive: int | None = None
        # A daemon: a stuck look at a dead server does not keep `nyala up` from ending.
        self._thread = threading.Thread(target=self._watch, name="crew", daemon=True)

    @property
    def alive(self) -> int | None:
        """Actors alive at the last look; None before the first and while Redis is away."""
        return self._alive

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def mourn(self, pid: int) -> None:
        """Say that an actor's process on this machine has ended."""
        self._deaths.put(pid)

    def close(self) -> None:
        """Look no more."""
        self._deaths.put(None)

    def _watch(self) -> None:
        store = Store(self._url, run=self._settings.run.name)
        while True:
            try:
                dead = self._deaths.get(timeout=LOOK_EVERY_S)
                if dead is None:
                    return
            except queue.Empty:
                dead = NOBODY
            try:
                seen = store.run(operations.actors())
                limit_s = self._settings.broker.heartbeat_timeout_s
                self._alive = sum(actor.silent_s <= limit_s for actor in seen)
                if dead != NOBODY:
                    self._take_back(store, seen, dead)
            except NyalaError:
                self._alive = None

    def _take_back(self, store: Store, seen: Iterable[ActorSeen], pid: int) -> None:
        here = {"host": socket.gethostname(), "pid": str(pid)}
        for actor in seen:
            if here.items() <= actor.fields.items():
                most = self._settings.broker.max_attempts
                store.run(operations.bereave(actor.incarnation, max_attempts=most))
