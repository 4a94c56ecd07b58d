"""Tracing in one process where the settings ask for it: the exporting thread; else nothing.

Entered once in each process of an actor, broker and learner.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, Self

import structlog

from configs.tables.run import RunSettings

from .traces import TRACES, Span, TraceIds, Traces
from .worker import Worker

# --------------------------------------------------------------------------------------------------
# The thread that exports the spans of this process.
#
# Consumes what waits in `Traces`, every `EVERY_S`; waits for the collector, and nobody for it: a
# collector that is away or hangs costs spans, which are counted. At the end of the process it gets
# `CLOSE_S` for what is left.

EVERY_S = 1.0  # a killed actor leaves what it did until a second before
BATCH = 512  # spans of a request: 200 kB
CLOSE_S = 2.0  # a hundred requests to a collector that answers

log = structlog.get_logger()


class Collector(Protocol):
    """The part of `otlp.OtlpCollector` that tracing needs."""

    def send(self, spans: Sequence[Span]) -> str | None:
        """Send spans; return the reason why the collector has not taken them."""
        ...

    def close(self) -> None:
        """Abort the request under way."""
        ...


class Exporter:
    """Exports from `start` to `close`."""

    def __init__(self, traces: Traces, collector: Collector, *, close_s: float = CLOSE_S) -> None:
        self._traces, self._collector, self._close_s = traces, collector, close_s
        self._closing = threading.Event()
        self._is_away = self._was_full = False
        self._exported = self._refused = self._dropped = 0
        self._cpu_s = 0.0
        self._worker = Worker(self._work, name="traces")

    def start(self) -> Self:
        """Start the thread that exports."""
        self._worker.start()
        return self

    def close(self) -> None:
        """Export what is left, within `close_s`, and log how many spans were sent and lost.

        Spans that are left then are dropped.
        """
        self._closing.set()
        with suppress(Exception):  # it has logged its error
            self._worker.join(self._close_s)
        in_hand = self._worker.is_alive
        self._collector.close()
        left, dropped = self._traces.close(), self._traces.dropped
        figures = {
            "exported": self._exported,
            "not_taken": self._refused,
            "dropped": dropped,
            "cpu_s": round(self._cpu_s, 3),
        }
        if left or in_hand:
            log.warning("spans were not sent", **figures, left=left, is_sending=in_hand)
        else:
            log.info("traces", **figures)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(EVERY_S)
            while spans := self._traces.take_spans(BATCH):
                self._send(spans)
                self._cpu_s = time.thread_time()
            self._look_at_drops()

    def _send(self, spans: Sequence[Span]) -> None:
        reason = self._collector.send(spans)
        if reason is not None:
            self._refused += len(spans)
            if not self._is_away:
                log.warning("the collector does not accept spans", reason=reason)
        else:
            self._exported += len(spans)
            if self._is_away:
                log.info("the collector accepts spans again", not_taken=self._refused)
        self._is_away = reason is not None

    def _look_at_drops(self) -> None:
        """Warn once of a full queue, until there has been room again."""
        dropped = self._traces.dropped
        if dropped > self._dropped and not self._was_full:
            log.warning("spans are dropped", dropped=dropped)
        self._was_full, self._dropped = dropped > self._dropped, dropped


# --------------------------------------------------------------------------------------------------
# Tracing in one process where the settings ask for it; else nothing is imported.


@contextmanager
def tracing(
    run: RunSettings, role: str, *, salt: Callable[[], bytes], name: str | None = None
) -> Iterator[None]:
    """Trace episodes during the block; nothing without `run.tracing.endpoint`.

    A collector that cannot be reached costs spans, never an error.

    Args:
        run: Settings of the run.
        role: `actor`, `broker` or `learner`.
        salt: Returns bytes that only this run has, the same in each of its processes.
        name: Name of this process; None = its machine and id.
    """
    settings = run.tracing
    if settings.endpoint is None:
        yield
        return
    from .otlp import OtlpCollector  # noqa: PLC0415 - imports that most runs can spare

    resource = {
        "service.namespace": "nyala",
        "service.name": f"nyala-{role}",
        "service.instance.id": name or f"{socket.gethostname()}-{os.getpid()}",
        "nyala.run": run.name,
    }
    collector = OtlpCollector(settings.endpoint, resource)
    TRACES.open(TraceIds(run.name, salt()), share=settings.share)
    exporter = Exporter(TRACES, collector).start()
    try:
        yield
    finally:
        exporter.close()
