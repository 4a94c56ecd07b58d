"""A background save of 111 MiB of weights and their moments, beside a synchronous one.

In wall time, since the disk and another core take part: it wants a quiet machine.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.learner.arm import OurLoop, trained_tokens
from benchmarks.learner.workload import make_causal_lm, make_episodes
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.reporting.metrics import Totals

LAYERS = 26  # 111 MiB of weights
BUDGET = 16384


def save() -> dict[str, float]:
    """Save in both ways, then train while a save is under way, and as many steps without one."""
    loop = OurLoop(BUDGET, make_causal_lm(layers=LAYERS))
    episodes = make_episodes(1)[:1]  # a short step: as little as possible runs beyond the save
    loop.step(episodes)
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=1, ranks=loop.ranks)
        # Host memory for the copy is taken at the first save, and kept.
        checkpoints.begin_save(_state(1), loop.policy, loop.optimizer, then=_nothing)
        checkpoints.under_way.wait()
        began = time.monotonic()
        checkpoints.save(_state(2), loop.policy, loop.optimizer)
        synchronous_s = time.monotonic() - began

        began, began_cpu = time.monotonic(), time.process_time()
        checkpoints.begin_save(_state(3), loop.policy, loop.optimizer, then=_nothing)
        blocked_s = time.monotonic() - began
        steps = 0
        while checkpoints.under_way.is_under_way:
            loop.step(episodes)
            steps += 1
        checkpoints.under_way.wait()
        beside_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    began = time.monotonic()
    for _ in range(steps):
        loop.step(episodes)
    without_s = time.monotonic() - began
    tokens = steps * trained_tokens(episodes)
    return {
        "cpu_s": cpu_s,
        "synchronous_s": synchronous_s,
        "blocked_s": blocked_s,
        "tokens_per_s": tokens / beside_s,
        "tokens_per_s_without": tokens / without_s,
    }


def _state(step: int) -> LearnerState:
    return LearnerState(
        run="benchmark",
        settings_hash="",
        step=step,
        lineage=1,
        cursor=0,
        trained=(),
        totals=Totals(),
    )


def _nothing() -> None:
    """No COMMIT follows: there is no store."""
