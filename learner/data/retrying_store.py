"""A store client that retries while Redis is away, and has it recovered when it lost writes.

Redis restarts in seconds; a learner that died of it would lose minutes. Only operations that may be
sent twice go through here, which are all of the learner's. Refusals are not retried: the answer
would be the same. The thread that first finds the store restarted or rewound recovers it, and all
threads then repeat the operation that failed; the rest of the learner only sees a slow call.

    away --pause--> away --answers, the same server process--> done
                         --answers, restarted or rewound--> recover, once for all threads --> done
         --the learner is told to stop--> gone: the end of the run, and no outage
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

PATIENCE_S = 60.0  # a supervised Redis is back in seconds; after a minute a person must look
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0

Recover = Callable[[Store, str], None]
"""Writes again what the store lost, into the server process with this run_id."""


class SuppressUnreachableStore:
    """A block that ends early and without an error if the store is away while the learner stops.

    When all processes of a run are told to end at once, the store may be the first to go. What it
    was to be told is in the files of the run, and the next start puts it right.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Suppress the error of a store that is away while the learner stops."""
        if not isinstance(error, StoreUnreachable) or not self._stopping.is_set():
            return False
        log.warning(
            "the store stopped before the learner: the next start writes the rest",
            reason=str(error),
        )
        return True


class RetryingStore:
    """Runs operations, and retries while the store cannot be reached, up to a deadline.

    Args:
        store: Store of the run.
        patience_s: Longest time for which an operation is retried.
        stopping: Set when the learner is asked to stop; from then on nothing is retried.
    """

    def __init__(
        self,
        store: Store,
        *,
        patience_s: float = PATIENCE_S,
        stopping: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._patience_s = patience_s
        self._stopping = threading.Event() if stopping is None else stopping
        self._recover: Recover | None = None
        self.lock: AbstractContextManager[object] = threading.RLock()
        """Held by recovery; hold it briefly, and run no operation under it."""
        self.recoveries = 0
        """Recoveries so far; what was read from the store before the last may be wrong."""

    def on_rewind(self, recover: Recover) -> None:
        """Set the function that recovers; without it, a restarted or rewound store is an error."""
        self._recover = recover

    def trust(self) -> str:
        """Work with the server process that answers now; returns its run_id.

        Waits for a server as `run` does, and raises the same if there is none.
        """
        run_id = self._patiently(self._store.server_run_id)
        self._store.trust(run_id)
        return run_id

    def run(self, operation: Operation[T]) -> T:
        """Run an operation, retrying while the store is away.

        A store that restarted or lost writes is recovered first, in this thread.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, was away for longer than `patience_s`, or is away while
                the learner is asked to stop; or recovery failed.
        """
        return self._patiently(lambda: self._attempt(operation))

    def may_be_gone(self) -> SuppressUnreachableStore:
        """Return a block that ends early, without an error, if the store is away during a stop."""
        return SuppressUnreachableStore(self._stopping)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except StoreUnreachable as error:
                if isinstance(error, StoreRestarted) and self._recover is None:
                    raise  # waiting would not help: the learner has to start again
                if self._stopping.is_set():
                    raise
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                jittered_s = random.uniform(0.5, 1.0) * pause_s
                if time.monotonic() + jittered_s > deadline:
                    raise
                log.warning(
                    "the store is unreachable", reason=str(error), retry_in_s=round(jittered_s, 2)
                )
                self._stopping.wait(jittered_s)

    def _attempt(self, operation: Operation[T]) -> T:
        recoveries = self.recoveries
        try:
            return self._store.run(operation)
        except (StoreRestarted, StoreRewound) as error:
            if self._recover is None:
                raise
            self._recover_once(self._recover, error, recoveries)
        return self._store.run(operation)

    def _recover_once(self, recover: Recover, error: StoreError, recoveries: int) -> None:
        """Recover, unless another thread has done it since `recoveries` was read."""
        with self.lock:
            if self.recoveries != recoveries:
                return
            log.warning("THE STORE MAY HAVE LOST WRITES: repairing it", reason=str(error))
            began = time.monotonic()
            run_id = self._store.server_run_id()
            # A client of its own: that of the other threads stays closed until recovery has ended.
            with self._store.at(run_id) as fresh:
                recover(fresh, run_id)
            self._store.trust(run_id)
            self.recoveries += 1
            log.info("the store is repaired", took_s=round(time.monotonic() - began, 3))
