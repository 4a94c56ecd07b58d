"""The whole ring with either engine, by the size of the model and the length of completions.

Batches of 64 completions of a random model, one actor, one thread in each process, in turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ring.watched_run import measure_ring, together
from benchmarks.support.progress import Say
from benchmarks.support.workload import THROUGHPUT, Workload


class Case(NamedTuple):
    """A shape, and the most tokens of a completion."""

    layers: int
    width: int
    tokens: int


CASES = {
    "0.6m_12": Case(3, 128, 12),
    "0.8m_32": Case(4, 128, 32),
    "0.8m_64": Case(4, 128, 64),
    "1.9m_32": Case(6, 192, 32),
}
"""By millions of parameters and tokens."""
ENGINES = ("torch", "vllm")


def engines(folder: Path, *, rounds: int, batches: int, say: Say) -> dict[str, Any]:
    """Measure trained tokens per second and per CPU second of each case with both engines."""
    found: dict[str, list[dict[str, Any]]] = {}
    for index in range(rounds):
        for name, case in CASES.items():
            for engine in ENGINES:
                arm = f"{engine}_{name}"
                overrides = (
                    *THROUGHPUT,
                    f"learner.init_layers={case.layers}",
                    f"learner.init_width={case.width}",
                    f"run.max_completion_tokens={case.tokens}",
                    f"actors.engine={engine}",
                )
                workload = Workload(f"{arm}-{index}", "demo.yaml", folder, overrides)
                found.setdefault(arm, []).append(measure_ring(workload, batches))
                say(f"{arm}: {found[arm][-1]}")
    return {arm: together(runs) for arm, runs in found.items()}
