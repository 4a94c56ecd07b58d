"""Which actors a run has, its own and those that joined, from the store.

Asks in a thread of its own: a Redis that does not answer must not hold up the supervision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from configs.errors import NyalaError
from configs.settings import Settings

LOOK_EVERY_S = 2.0


class Crew:
    """Counts the actors that gave a sign of life within `broker.heartbeat_timeout_s`.

    Example:
        crew = Crew(settings, url)
        crew.start()
        print(crew.alive)
        crew.close()
    """

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        self._ended = threading.Event()
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

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _watch(self) -> None:
        look = count_actors(self._settings, self._url)
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                self._alive = look()
            except NyalaError:
                self._alive = None


def count_actors(settings: Settings, url: str) -> Callable[[], int]:
    """Return a function that counts the living actors of a run."""
    from buffer.operations import actors
    from buffer.store import Store

    store = Store(url, run=settings.run.name)
    limit_s = settings.broker.heartbeat_timeout_s
    return lambda: sum(actor.silent_s <= limit_s for actor in store.run(actors()))
