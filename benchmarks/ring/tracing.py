"""The cost of traces: CPU per trained token of the demo with those of a tenth and of all episodes.

In turns with runs without any, so that what else the machine does meets all sides. Beside it the
CPU time that the exporting threads have logged for themselves, and what a call that makes a span
takes of the thread that makes it, with and without traces.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.ring.watched_run import watch
from benchmarks.ring.watching import FIRST, own_percent
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, make_model
from configs.traces import MAX_WAITING, TRACES, EpisodePhase, TraceIds, begin_lease_trace

OVERRIDES = ("actors.engine=torch", "run.eval_episodes=0")
SHARES = {"off": 0.0, "tenth": 0.1, "all": 1.0}
CALLS = 4000  # lives of a measurement: their spans fit into the queue


def tracing(folder: Path, *, rounds: int, batches: int, say: Say) -> dict[str, Any]:
    """Run the demo with the small engine, traced by shares, and compare CPU per token."""
    base = Workload("tracing", "demo.yaml", folder, OVERRIDES)
    base = replace(base, model=make_model(base))
    per_token: dict[str, list[float]] = {name: [] for name in SHARES}
    own: dict[str, list[float]] = {name: [] for name in SHARES}
    with _collector() as endpoint:
        for index in range(rounds):
            for name in sorted(SHARES, reverse=bool(index % 2)):
                changes = (f"run.tracing.endpoint={endpoint}", f"run.tracing.share={SHARES[name]}")
                overrides = (*base.overrides, *(changes if SHARES[name] else ()))
                workload = replace(base, name=f"{name}-{index}", overrides=overrides)
                trace = watch(workload, lambda seen: len(seen.metrics) >= batches)
                cpu_s = trace.cpu_s(FIRST, batches)
                logs = workload.settings().run.folder / "logs"
                own[name].append(own_percent(logs, cpu_s=cpu_s, threads=("traces",))["all"])
                per_token[name].append(1e6 / trace.tokens_per_cpu_s(FIRST, batches))
                say(f"{workload.name}: {per_token[name][-1]:.1f} s of CPU per million tokens")
    return {
        "tracing": {
            "cpu_s_per_million_tokens": {
                name: [round(value, 1) for value in values] for name, values in per_token.items()
            },
            "extra_cpu_percent": {
                name: [
                    round(100 * (on / off - 1), 2)
                    for on, off in zip(per_token[name], per_token["off"], strict=True)
                ]
                for name in ("tenth", "all")
            },
            "exporter_cpu_percent": {
                name: round(statistics.mean(own[name]), 3) for name in ("tenth", "all")
            },
            "us_per_lease": {name: round(us_per_lease(share), 2) for name, share in SHARES.items()},
        }
    }


def us_per_lease(share: float) -> float:
    """Measure what a lease with one phase costs the actor's event loop, microseconds.

    Args:
        share: Of the episodes that are traced; 0 = traces are off.
    """
    if not share:
        return _least_us(_live)
    TRACES.open(TraceIds("benchmark", b""), share=share)
    try:
        return _least_us(_live)
    finally:
        TRACES.close()


def _live() -> None:
    for task_id in range(CALLS):
        life = begin_lease_trace(task_id, 1)
        life.enter(EpisodePhase.SAMPLE, turn=0, first_token=0)
        life.note(end_token=7, finish="stop")
        life.end_trace("OK")


def _least_us(work: Callable[[], None]) -> float:
    """Time the fastest of a few: what else the machine does only adds to it."""
    took = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
        TRACES.take_spans(MAX_WAITING)
    return 1e6 * min(took) / CALLS


@contextmanager
def _collector() -> Iterator[str]:
    """Take spans and forget them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
