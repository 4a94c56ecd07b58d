"""Traces of chosen batches, in Chrome's format: `<run>/traces/batch-000003-rank-0.json`.

Open one at ui.perfetto.dev or chrome://tracing. Phases are named in it, kernels as torch names
them. A traced batch is slower, and its trace has some hundred megabytes for a large model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

from configs import durable

from .phases import RECORDER

log = structlog.get_logger()

FOLDER = "traces"


@contextmanager
def traced(run_folder: Path, step: int, *, rank: int) -> Iterator[None]:
    """Write a trace of what happens within, as that of batch `step`."""
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as profiler:
        RECORDER.is_traced = True
        try:
            yield
        finally:
            RECORDER.is_traced = False
    folder = run_folder / FOLDER
    durable.make_folder(folder)
    file = folder / f"batch-{step:06d}-rank-{rank}.json"
    profiler.export_chrome_trace(str(file))
    log.info("trace written", step=step, file=str(file))
