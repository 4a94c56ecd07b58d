"""Redis memory held by batches that are trained and not committed.

Records stay in the store until a checkpoint contains their batch: else a learner that dies could
not train them again. With long episodes that is more than Redis has, long before a checkpoint is
due.
"""

from __future__ import annotations

import structlog

from buffer import operations
from configs.settings import BufferSettings
from configs.validation.store import COMMIT_AT_MEMORY, max_uncommitted_bytes

from .retrying_store import RetryingStore

WORTH_COMMITTING = 0.05  # of maxmemory: committing less would not help whatever else fills it

log = structlog.get_logger()


class CommitPressure:
    """Decides when to commit before it is due."""

    def __init__(self, store: RetryingStore, buffer: BufferSettings) -> None:
        self._store = store
        self._limit_bytes = max_uncommitted_bytes(buffer)
        self._bytes: dict[int, int] = {}
        self._committed = 0

    def is_crowded(self, k: int) -> bool:
        """Add batch k, which was just trained; True if it is time to commit."""
        self._bytes[k] = self._store.run(operations.claim_bytes(k))
        committed = self._committed  # the other thread's word
        self._bytes = {step: size for step, size in self._bytes.items() if step > committed}
        uncommitted = sum(self._bytes.values())
        memory = self._store.run(operations.memory())
        is_full = memory.share >= COMMIT_AT_MEMORY
        is_worth_it = uncommitted >= WORTH_COMMITTING * memory.limit_bytes
        if uncommitted < self._limit_bytes and not (is_full and is_worth_it):
            return False
        log.info(
            "checkpoint before its time: Redis is crowded",
            uncommitted_bytes=uncommitted,
            memory=round(memory.share, 3),
        )
        return True

    def committed(self, k: int) -> None:
        """Forget the batches up to k: their records are deleted. From any thread."""
        self._committed = k
