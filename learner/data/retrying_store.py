"""A store that may be away for a while, and may come back with less than it had.

Redis restarts in seconds; a learner that died of it would lose minutes. Only operations that may be
sent twice go through here, which are all of the learner's. Refusals are not retried: they would be
the same. When the store has forgotten something, whoever notices puts it right before anything else
is done, and then repeats what it was about to do; the rest of the learner only sees a slow call.

    away --pause--> away --answers, the same life--> done
                         --answers, restarted or rewound--> recover, once for all threads --> done
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import structlog

from buffer.operations.operation import Operation
from buffer.store import Store
from configs.errors import StoreError, StoreRestarted, StoreRewound, StoreUnreachable

T = TypeVar("T")
log = structlog.get_logger()

PATIENCE_S = 60.0  # a supervised Redis is back in seconds; after a minute somebody must look
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0

Recover = Callable[[Store, str], None]
"""Puts right, in the life of the server with this run_id, what the store has forgotten."""


class PatientStore:
    """Runs operations, again and again while the store cannot be reached, up to a deadline."""

    def __init__(self, store: Store, *, patience_s: float = PATIENCE_S) -> None:
        self._store = store
        self._patience_s = patience_s
        self._recover: Recover | None = None
        self._calm = threading.RLock()
        self.recoveries = 0
        """How often the store was put right; what was read from it before may be wrong."""

    def on_rewind(self, recover: Recover) -> None:
        """Say how to put the store right; before that, a restarted or rewound one is an error."""
        self._recover = recover

    def calm(self) -> AbstractContextManager[object]:
        """Keep recovery from beginning in another thread, for a moment and without operations."""
        return self._calm

    def trust(self) -> str:
        """Work with the life of the server that answers now; returns its run_id."""
        run_id = self._patiently(self._store.server_run_id)
        self._store.trust(run_id)
        return run_id

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for longer than the patience lasts.
        """
        return self._patiently(lambda: self._attempt(operation))

    def _patiently(self, attempt: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except StoreUnreachable as error:
                if isinstance(error, StoreRestarted) and self._recover is None:
                    raise  # waiting would not help: this life has to begin again
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                jittered_s = random.uniform(0.5, 1.0) * pause_s
                if time.monotonic() + jittered_s > deadline:
                    raise
                log.warning("the store is away", reason=str(error), retry_in_s=round(jittered_s, 2))
                time.sleep(jittered_s)

    def _attempt(self, operation: Operation[T]) -> T:
        recoveries = self.recoveries
        try:
            return self._store.run(operation)
        except (StoreRestarted, StoreRewound) as error:
            if self._recover is None:
                raise
            self._put_right(self._recover, error, recoveries)
        return self._store.run(operation)

    def _put_right(self, recover: Recover, error: StoreError, recoveries: int) -> None:
        """Recover, unless another thread has done it since `recoveries` was read."""
        with self._calm:
            if self.recoveries != recoveries:
                return
            log.warning("THE STORE MAY HAVE LOST WRITES: putting it right", reason=str(error))
            began = time.monotonic()
            run_id = self._store.server_run_id()
            # A client of its own: the other threads' stays closed until all is right.
            with self._store.at(run_id) as fresh:
                recover(fresh, run_id)
            self._store.trust(run_id)
            self.recoveries += 1
            log.info("the store is right again", took_s=round(time.monotonic() - began, 3))
