"""Rank 0's alarm of episodes that nobody makes, and its early commits as Redis memory fills up."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import structlog

from buffer import operations
from buffer.sampling import why_nobody_samples
from configs.settings import BufferSettings, Settings
from configs.validation.store import COMMIT_AT_MEMORY, max_uncommitted_bytes

from .retrying_store import RetryingStore

# --------------------------------------------------------------------------------------------------
# An alarm when the learner waits for episodes that nobody makes.
#
#     quiet --no episode for `console.alarm_s`, and nobody samples--> alarm --episodes come--> quiet
#
# One warning when it begins, one when its cause changes, one line when it ends.

log = structlog.get_logger()


class SamplingAlarm:
    """Watches the waits of rank 0; it must be called a few times a minute.

    Args:
        store: Asked only once a wait is longer than `console.alarm_s`.
        settings: Settings of the run.
        clock: Seconds.
    """

    def __init__(
        self,
        store: RetryingStore,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._progress: object = None
        self._fed_at = clock()
        self._began_at: float | None = None
        self._cause = ""
        self.alarms = 0
        """Alarms raised since the learner started."""

    def check_progress(self, progress: object) -> None:
        """Raise the alarm, or end it; both are lines of the log.

        Args:
            progress: Changes whenever episodes have come.

        Raises:
            StoreError: The store, asked after `console.alarm_s` without progress, refused.
        """
        now = self._clock()
        if progress != self._progress:
            self._progress, self._fed_at = progress, now
        waited_s = now - self._fed_at
        reason = self._reason() if waited_s >= self._settings.console.alarm_s else None
        cause = "" if reason is None else re.sub(r"\d+", "", reason)  # but for its figures
        if reason is not None and cause != self._cause:
            if self._began_at is None:
                self._began_at = now
                self.alarms += 1
            log.warning("ALARM: nobody samples", why=reason, waited_s=round(waited_s))
        elif reason is None and self._began_at is not None:
            lasted_s = round(now - self._began_at)
            log.info(
                "the alarm has ended: actors sample again, or episodes have come", lasted_s=lasted_s
            )
            self._began_at = None
        self._cause = cause

    def _reason(self) -> str | None:
        settings = self._settings
        return why_nobody_samples(
            self._store.run(operations.stats()),
            self._store.run(operations.actors()),
            self._store.run(operations.memory(of_run=settings.buffer.max_run_bytes is not None)),
            self._store.run(operations.closed()),
            folder=settings.run.folder,
            heartbeat_timeout_s=settings.broker.heartbeat_timeout_s,
            pause_at_memory=settings.buffer.pause_at_memory,
            max_run_bytes=settings.buffer.max_run_bytes,
        )


# --------------------------------------------------------------------------------------------------
# Redis memory held by batches that are trained and not committed.
#
# Records stay in the store until a checkpoint contains their batch: else a learner that dies could
# not train them again. With long episodes that is more than Redis has, long before a checkpoint is
# due.

WORTH_COMMITTING = 0.05  # of maxmemory: committing less would not help whatever else fills it


class CommitPressure:
    """Decides when rank 0 commits early, by the bytes of trained batches that are not committed."""

    def __init__(self, store: RetryingStore, buffer: BufferSettings) -> None:
        self._store = store
        self._limit_bytes = max_uncommitted_bytes(buffer)
        self._bytes: dict[int, int] = {}
        self._committed = 0

    def is_crowded(self, k: int) -> bool:
        """Add batch k, which was just trained; True if it is time to commit early.

        That is so once trained batches hold `buffer.max_uncommitted_bytes`, or Redis is nearly full
        and they hold `WORTH_COMMITTING` of it.
        """
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
            "early checkpoint: Redis is nearly full",
            uncommitted_bytes=uncommitted,
            memory=round(memory.share, 3),
        )
        return True

    def committed(self, k: int) -> None:
        """Forget the batches up to k, whose records are deleted. From any thread."""
        self._committed = k
