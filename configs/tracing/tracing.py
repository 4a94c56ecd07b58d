"""Tracing in one process where the settings ask for it; else nothing is imported."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from configs.tables.run import RunSettings

from .exporter import Exporter
from .span import TraceIds
from .traces import TRACES


@contextmanager
def tracing(
    run: RunSettings, role: str, *, salt: Callable[[], bytes], name: str | None = None
) -> Iterator[None]:
    """Trace episodes while the body runs; nothing without `run.tracing.endpoint`.

    Args:
        run: Of the run.
        role: `actor`, `broker` or `learner`.
        salt: Returns what this run alone has, the same in every process of it.
        name: Of this process; None = its machine and id.
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
