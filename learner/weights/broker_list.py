"""Addresses of the run's brokers on their way to actors: from the store to the publisher's folder.

The learner reads them from the store in a thread of its own, since no batch ends while no broker
serves; the publisher reads the file (`BrokerList`) and tells its actors.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from broker.protocol.fields import MAX_BROKERS
from buffer.live_brokers import LiveBrokers
from configs.errors import StoreError
from configs.worker import Worker

log = structlog.get_logger()

LOOK_EVERY_S = 1.0

FindBrokers = Callable[[], Mapping[str, Mapping[str, float]]]
"""Reads the figures of each broker, by its address, from the store."""


class BrokerList:
    """The file with the brokers. Producer: learner rank 0. Consumer: the publisher."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "brokers.json"

    def write(self, endpoints: tuple[str, ...]) -> None:
        """Replace the list of brokers in one step."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(endpoints), encoding="utf-8")
        new.replace(self._path)

    def read(self) -> tuple[str, ...]:
        """Return the list of brokers; nothing before the first `write`."""
        try:
            return tuple(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return ()


class BrokerWatch:
    """Follows which brokers serve, in a thread.

    Args:
        find: Asks the store.
        on_change: Receives the addresses of those that serve; never none.
    """

    def __init__(self, find: FindBrokers, on_change: Callable[[tuple[str, ...]], None]) -> None:
        self._find = find
        self._on_change = on_change
        self._live = LiveBrokers(at_most=MAX_BROKERS, clock=time.monotonic)
        self._is_closing = threading.Event()
        self._worker = Worker(self._watch, name="broker-watch").start()

    def check_broker_thread(self) -> None:
        """Raise the error that ended the thread, if one did.

        Raises:
            Exception: A defect: an error of the store is logged, and does not end it.
        """
        self._worker.raise_if_failed()

    def close(self) -> None:
        """Stop the thread; it may still be asking the store."""
        self._is_closing.set()

    def _watch(self) -> None:
        reported: tuple[str, ...] = ()
        while not self._is_closing.wait(LOOK_EVERY_S):
            try:
                live = self._live.observe(self._find())
            except StoreError as error:  # the learner's other operations end it where they must
                log.warning("brokers not looked up", reason=str(error))
                continue
            if live and live != reported:
                self._on_change(live)
                reported = live
