"""A store that may be away for a while.

Redis restarts in seconds; a learner that died of it would lose minutes. Only operations that may be
sent twice go through here, which are all of the learner's. Refusals are not retried: they would be
the same.
"""

from __future__ import annotations

import random
import time
from typing import TypeVar

import structlog

from buffer.operation import Operation
from buffer.store import Store
from configs.errors import StoreUnreachable

T = TypeVar("T")
log = structlog.get_logger()

PATIENCE_S = 60.0  # a supervised Redis is back in seconds; after a minute somebody must look
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class PatientStore:
    """Runs operations, again and again while the store cannot be reached, up to a deadline."""

    def __init__(self, store: Store, *, patience_s: float = PATIENCE_S) -> None:
        self._store = store
        self._patience_s = patience_s

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for longer than the patience lasts.
        """
        deadline = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._store.run(operation)
            except StoreUnreachable as error:
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                jittered_s = random.uniform(0.5, 1.0) * pause_s
                if time.monotonic() + jittered_s > deadline:
                    raise
                log.warning("the store is away", reason=str(error), retry_in_s=round(jittered_s, 2))
                time.sleep(jittered_s)
