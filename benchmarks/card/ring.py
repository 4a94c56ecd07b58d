"""The whole ring on one card: `nyala up`, first with no kernel in any cache, then once more."""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.card.stage import Asked, Figures, Note, main
from benchmarks.ring.start import stages_of
from benchmarks.ring.watched_run import Trace, watch
from benchmarks.support.workload import Workload
from configs.json_lines import read_rows

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "cache",
}
"""Environment variable -> folder that both starts share."""
PRETRAINED = (
    "run.dtype=bfloat16",
    "run.group_size=16",
    "run.groups_per_batch=32",
    "run.eval_every=0",
    "actors.kv_cache_gib=8",
    "learner.device=cuda",
    "learner.microbatch_tokens=32768",
    "learner.checkpoint_every=1000",
)
SMALL = ("run.eval_every=0", "run.eval_episodes=0", "actors.count=1")
WARM_UP = 3


def measure(asked: Asked, note: Note) -> None:
    """Start twice: many batches, then few."""
    for variable, name in CACHES.items():
        os.environ[variable] = str(asked.folder / "caches" / name)
    batches = {"cold": 4, "warm": 2} if asked.is_tiny else {"cold": 25, "warm": 5}
    for name, number in batches.items():
        note(name, _run(asked, name, number))


def _run(asked: Asked, name: str, batches: int) -> Figures:
    if asked.model is None:
        own = (*SMALL, "learner.warm_start_steps=5", *_small_engine(asked))
        workload = Workload(f"ring-{name}", "demo.yaml", asked.folder, own)
    else:
        workload = Workload(
            f"ring-{name}", "smollm2.yaml", asked.folder, PRETRAINED, model=asked.model
        )
    began = time.time()
    trace = watch(workload, lambda seen: len(seen.metrics) >= batches)
    folder = workload.settings().run.folder
    return {
        "model": asked.model.name if asked.model else "init",
        "first_batch_s": round(trace.metrics[0]["time"] - began, 1),
        "batches": len(trace.metrics),
        **_rates(trace),
        "stages_begin_s": stages_of(folder / "logs", began),
        **_swaps(folder),
    }


def _small_engine(asked: Asked) -> tuple[str, ...]:
    return (
        ("actors.engine=torch", "learner.device=cpu")
        if asked.is_tiny
        else ("actors.kv_cache_gib=1",)
    )


def _rates(trace: Trace) -> Figures:
    """Rates once both sides work; rewards of the first and last batches."""
    metrics = trace.metrics
    late = metrics[min(WARM_UP, len(metrics) - 2) :]
    seconds = late[-1]["time"] - late[0]["time"]
    made = sum(line["completion_tokens"] for line in late[1:])
    rewards = [line["reward_mean"] for line in metrics]
    return {
        "tokens_per_s": round(made / seconds, 1),
        "learner_waits": round(sum(line["wait_s"] for line in late[1:]) / seconds, 3),
        "reward_first_last": [
            round(statistics.mean(part), 3) for part in (rewards[:3], rewards[-3:])
        ],
    }


def _swaps(folder: Path) -> Figures:
    """Return the pauses of the actor's versions; rows add theirs up."""
    rows: list[Figures] = read_rows(folder / "weights.jsonl")
    sums = [0.0, *(row["paused_s"] for row in rows if "paused_s" in row)]
    pauses = [later - earlier for earlier, later in pairwise(sums)]
    return {"pause_s": round(statistics.median(pauses), 4)} if pauses else {}


if __name__ == "__main__":
    main(measure)
