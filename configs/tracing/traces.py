"""The traces of this process: which episodes have one, and the spans that wait to be exported.

One for a process, as its loggers are, and off until `tracing` opens it: then `of` costs a
comparison, and nobody makes a span. A span that finds the queue full is dropped and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from random import Random

from .span import Span, TraceIds, is_sampled

MAX_WAITING = 8192  # spans: 8 MB, and more than a process makes between two exports


class Traces:
    """Spans of the sampled episodes; any thread may put them."""

    def __init__(self) -> None:
        self._ids: TraceIds | None = None
        self._share = 0.0
        self._waiting: deque[Span] = deque()
        self._lock = threading.Lock()
        self._random = Random()
        self.dropped = 0
        """Spans that found the queue full, since it was opened."""

    @property
    def is_on(self) -> bool:
        """Whether any episode is traced."""
        return self._ids is not None

    def open(self, ids: TraceIds, *, share: float) -> None:
        """Trace this share of the episodes from now on."""
        with self._lock:
            self._waiting.clear()
            self._ids, self._share, self.dropped = ids, share, 0
            self._random = Random()  # a forked process must not repeat what its parent drew

    def close(self) -> int:
        """Trace nothing more; returns how many spans were waiting."""
        with self._lock:
            self._ids, left = None, len(self._waiting)
            self._waiting.clear()
        return left

    def of(self, task_id: int) -> int | None:
        """Return the id of the trace of a task; None where it has none."""
        if self._ids is None:
            return None
        trace_id = self._ids.of_task(task_id)
        return trace_id if is_sampled(trace_id, self._share) else None

    def of_batch(self, lineage: int, step: int) -> int | None:
        """Return the id of the trace of a batch, which has one wherever traces are on."""
        return None if self._ids is None else self._ids.of_batch(lineage, step)

    def new_span_id(self) -> int:
        """Draw the id of a span that nobody else refers to."""
        return self._random.getrandbits(64)

    def put(self, span: Span) -> None:
        """Have a span exported."""
        with self._lock:
            if self._ids is None or len(self._waiting) >= MAX_WAITING:
                self.dropped += self._ids is not None
                return
            self._waiting.append(span)

    def take(self, most: int) -> list[Span]:
        """Take the oldest spans that wait."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]


TRACES = Traces()
"""Those of this process."""
