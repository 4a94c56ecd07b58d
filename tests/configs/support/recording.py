"""Spans of a process that a test looks at in place of a collector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from configs.traces import MAX_WAITING, TRACES, Span, TraceIds

IDS = TraceIds("a run", b"its key")


class Recorded:
    """The spans so far."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        """All, in the order in which they ended."""
        self._spans += TRACES.take_spans(MAX_WAITING)
        return self._spans

    def of_task(self, task_id: int) -> list[Span]:
        """Those of a task, as they are found in its trace."""
        trace_id = IDS.of_task(task_id)
        return [span for span in self.spans if span.address.trace_id == trace_id]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def recording(*, share: float = 1.0) -> Iterator[Recorded]:
    """Trace all or some episodes while a test runs."""
    TRACES.open(IDS, share=share)
    try:
        yield Recorded()
    finally:
        TRACES.close()
