"""Models of 8 M to 100 M parameters with real vLLM on a CPU: the ring beside TRL.

Random weights, float32, 32 completions a batch, of at most 128 tokens: the model ends them by
chance, after 70 on average. Every arm trains the same prompts, with the same loss and reward.

    lag_2, lag_0   the ring, one actor with vLLM, by `max_policy_lag`
    trl            TRL's synchronous trainer with transformers' generation
    trl_vllm       the same with vLLM in its process

TRL has as many threads as make it quickest with transformers' generation. Its asynchronous trainer
asks for kernels and a transfer of weights that CUDA alone has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ring.trl.process import run_trl, trl_is_missing
from benchmarks.ring.watched_run import watch
from benchmarks.support.progress import Say
from benchmarks.support.workload import THROUGHPUT, Workload, make_model, write_prompts

GROUP_SIZE, GROUPS, MOST_TOKENS = 8, 4, 128
LAGS = {"lag_2": 2, "lag_0": 0}
ENGINES = {"trl": "transformers", "trl_vllm": "vllm"}
WARM_UP = 3
"""Batches of the ring that are not counted: the first were made while nobody trained."""


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, and how many batches of it are counted."""

    layers: int
    width: int
    batches: int


MODELS = {"8m": Model(6, 320, 16), "30m": Model(8, 576, 6), "100m": Model(12, 832, 4)}


def models(
    folder: Path, names: Sequence[str], *, rounds: int, threads: Sequence[int], say: Say
) -> dict[str, Any]:
    """Measure trained tokens/s of all arms, in turns."""
    missing = trl_is_missing()
    if missing:
        say(f"trl: skipped; {missing}")
    runs: dict[str, list[dict[str, float]]] = {}
    for index in range(rounds):
        for name in names:
            base = _workload(folder, name)
            for arm, lag in LAGS.items():
                found = _ring(base, f"{arm}_{name}-{index}", lag, MODELS[name].batches)
                runs.setdefault(f"{arm}_{name}", []).append(found)
                say(f"{arm}_{name}: {found}")
            counts = tuple(threads)
            for arm, engine in () if missing else ENGINES.items():
                best = _trl(base, engine, counts, MODELS[name].batches // 2)
                runs.setdefault(f"{arm}_{name}", []).append(best)
                say(f"{arm}_{name}: {best}")
                counts = (int(best["threads"]),)
    return {arm: _middle(found) for arm, found in runs.items()}


def _workload(folder: Path, name: str) -> Workload:
    shape = MODELS[name]
    overrides = (
        *THROUGHPUT,
        f"run.max_completion_tokens={MOST_TOKENS}",
        f"run.group_size={GROUP_SIZE}",
        f"run.groups_per_batch={GROUPS}",
        f"learner.init_layers={shape.layers}",
        f"learner.init_width={shape.width}",
        "learner.checkpoint_every=1000",  # none: TRL saves none either
        "actors.engine=vllm",
    )
    workload = Workload(f"models-{name}", "demo.yaml", folder, overrides)
    return replace(workload, model=make_model(workload))


def _ring(base: Workload, name: str, lag: int, batches: int) -> dict[str, float]:
    overrides = (*base.overrides, f"run.max_policy_lag={lag}")
    last = WARM_UP + batches
    trace = watch(
        replace(base, name=name, overrides=overrides), lambda seen: len(seen.metrics) >= last
    )
    cpu_ms = trace.cpu_ms_per_batch(WARM_UP, last)
    idle = trace.idle_fraction(WARM_UP, last)
    tokens_per_s = trace.tokens_per_s(WARM_UP, last)
    seconds = (trace.seconds(last) - trace.seconds(WARM_UP)) / batches
    return {
        "tokens_per_s": round(tokens_per_s, 1),
        "tokens_per_cpu_s": round(trace.tokens_per_cpu_s(WARM_UP, last), 1),
        "batch_s": round(seconds, 3),
        "learner_idle_fraction": round(idle, 3),
        "learner_cpu_s": round(cpu_ms.get("learner", 0.0) / 1e3, 3),
        "actors_cpu_s": round(cpu_ms.get("actors", 0.0) / 1e3, 3),
        # With the learner never idle, which is the best that perfect overlap gives it here.
        "tokens_per_s_of_a_busy_learner": round(tokens_per_s / (1 - idle), 1),
    }


def _trl(base: Workload, engine: str, threads: Sequence[int], steps: int) -> dict[str, float]:
    prompts = write_prompts(base, 64)
    runs = [
        run_trl(
            base.folder / "trl.log",
            model=base.model,
            prompts=prompts,
            steps=steps,
            batch=GROUP_SIZE * GROUPS,
            group_size=GROUP_SIZE,
            max_tokens=MOST_TOKENS,
            threads=count,
            lr=1e-9,
            engine=engine,
        )
        | {"threads": count}
        for count in threads
    ]
    best = max(runs, key=lambda run: run["tokens_per_s"])
    return {
        "threads": best["threads"],
        "tokens_per_s": round(best["tokens_per_s"], 1),
        "tokens_per_cpu_s": round(best["tokens_per_cpu_s"], 1),
        "batch_s": round(best["wall_s"] / steps, 3),
    }


def _middle(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the run in the middle by its speed, and the speeds of all."""
    ordered = sorted(runs, key=lambda run: run["tokens_per_s"])
    return ordered[(len(ordered) - 1) // 2] | {
        "all_tokens_per_s": [run["tokens_per_s"] for run in runs]
    }
