"""A pretrained model on word problems in float32 on two cores: the ring beside TRL's GRPO.

One model, the same rows, the same loss and optimizer, evaluated on held-out rows; seed by seed, in
turns. What is done is kept in the folder and not made again, so a long comparison can be ended and
continued.

    lag_2, lag_1, lag_0            the ring, one actor with vLLM, by `max_policy_lag`
    trl_1_thread, trl_2_threads    TRL's synchronous trainer with transformers' generation
    trl_vllm                       the same with vLLM in its process, two threads
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ring.learning import difference
from benchmarks.ring.trl.process import flags_of, run_trl, trl_is_missing
from benchmarks.ring.watched_run import Figures, Trace, watch
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, write_held_out, write_prompts

BATCHES, EVERY = 20, 10
WARM_UP = 2
"""Batches whose speed is not counted, of both sides."""
LAGS = {"lag_2": 2, "lag_1": 1, "lag_0": 0}
TRLS: Mapping[str, tuple[str, int]] = {
    "trl_1_thread": ("transformers", 1),
    "trl_2_threads": ("transformers", 2),
    "trl_vllm": ("vllm", 2),
}
"""Arm -> engine, threads of its one process."""
LIMIT_S = 7200.0
SPEEDS = ("tokens_per_s", "tokens_per_cpu_s", "all_batches_s")


def real(folder: Path, *, model: Path, seeds: int, batches: int, say: Say) -> dict[str, Any]:
    """Train by all arms and compare speeds and curves.

    Args:
        folder: For runs, logs, and results that are kept.
        model: Folder of a Hugging Face chat model.
        seeds: Of each arm.
        batches: Of each run, of 64 completions.
        say: Of progress.
    """
    overrides = (
        "run.dtype=float32",
        f"run.steps={batches}",
        f"run.eval_every={min(EVERY, batches)}",
        "learner.checkpoint_every=1000",  # TRL saves none either
    )
    base = Workload("real", "smollm2.yaml", folder, overrides, model=model)
    arms: dict[str, Callable[[int], Figures]] = {
        name: partial(_ring, base, name, lag) for name, lag in LAGS.items()
    }
    if missing := trl_is_missing():
        say(f"trl: skipped; {missing}")
    else:
        arms |= {name: partial(_trl, base, *how) for name, how in TRLS.items()}
    runs: dict[str, list[Figures]] = {name: [] for name in arms}
    for seed in range(seeds):
        for name, train in arms.items():
            file = folder / f"{name}-{seed}-{batches}.json"
            if not file.exists():
                file.write_text(json.dumps(train(seed)), encoding="utf-8")
            runs[name].append(json.loads(file.read_text(encoding="utf-8")))
            say(f"{name}, seed {seed}: {runs[name][-1]}")
    found = {name: _together(each) for name, each in runs.items()}
    for name, each in runs.items():
        found[name]["accuracy_minus_lag_2"] = difference(
            each, runs["lag_2"], list(each[0]["accuracy"])
        )
    return {f"real_{name}": figures for name, figures in found.items()}


def _ring(base: Workload, name: str, lag: int, seed: int) -> Figures:
    overrides = (*base.overrides, f"run.max_policy_lag={lag}", f"run.seed={seed}")
    workload = replace(base, name=f"real-{name}-{seed}", overrides=overrides)
    last = workload.settings().run.steps

    def is_done(seen: Trace) -> bool:
        return bool(seen.evaluations) and seen.evaluations[-1]["step"] >= last

    trace = watch(workload, is_done, limit_s=LIMIT_S)
    curve = {
        line["step"]: (trace.seconds(line["step"]), line["score"]) for line in trace.evaluations
    }
    return {
        "tokens_per_s": round(trace.tokens_per_s(WARM_UP, last), 1),
        "tokens_per_cpu_s": round(trace.tokens_per_cpu_s(WARM_UP, last), 1),
        **_curve(curve),
    }


def _trl(base: Workload, engine: str, threads: int, seed: int) -> Figures:
    settings = base.settings()
    run = settings.run
    seeded = replace(base, overrides=(*base.overrides, f"run.seed={seed}"))
    found = run_trl(
        base.folder / f"trl-{engine}-{threads}-{seed}.log",
        model=base.model,
        prompts=write_prompts(seeded, (run.steps + WARM_UP) * run.groups_per_batch),
        held_out=write_held_out(seeded, run.eval_episodes),
        is_chat=1,
        scorer="numeric",
        steps=run.steps - WARM_UP,  # it trains its first ones beside
        **flags_of(settings),
        seed=seed,
        threads=threads,
        engine=engine,
    )
    evaluations = found["evaluations"]
    first = evaluations[0]["time"] + evaluations[0]["took_s"]
    curve = {line["step"]: (line["time"] - first, line["accuracy"]) for line in evaluations}
    return {
        "tokens_per_s": round(found["tokens_per_s"], 1),
        "tokens_per_cpu_s": round(found["tokens_per_cpu_s"], 1),
        **_curve(curve),
    }


def _curve(curve: Mapping[int, tuple[float, float]]) -> Figures:
    """Return seconds from the first batch, and held-out accuracy, by batches trained."""
    return {
        "all_batches_s": round(max(seconds for seconds, _ in curve.values()), 1),
        "seconds": {str(step): round(seconds, 1) for step, (seconds, _) in curve.items()},
        "accuracy": {str(step): round(share, 3) for step, (_, share) in curve.items()},
    }


def _together(runs: list[Figures]) -> Figures:
    """Return medians of the speeds, and all runs."""
    return {name: statistics.median(run[name] for run in runs) for name in SPEEDS} | {"runs": runs}
