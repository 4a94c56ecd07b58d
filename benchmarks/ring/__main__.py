"""The cost of the ring, and its gain: `python -m benchmarks.ring [--full] [--only ARM]`.

Arms, each with both sides in this one run:

    actor  a real actor with real broker and Redis, and a sink for a learner, over the bare engine
           (`LLMEngine.step()`) and over the bare core (the actor's own stepper, the most that an
           actor can reach); completions of up to 128 tokens
    short  the same with completions of at most 32 tokens: more records for as many tokens
    async  `nyala up` of one task from one model: max_policy_lag 2 over 0, to the same accuracy
    trl    the whole ring over TRL's synchronous GRPO: same model, prompts, batch, length, reward;
           with an actor of the engine that suits so small a model, and of vLLM (`_vllm`), whose
           limit is printed where `short` is measured as well
    engines  the ring with either engine, by size of the model and length of completions
    start  seconds from `nyala up` to the first batch of the demo, from a model that is made, with
           each engine: by stage, and the CPU of each role
    learning  the demo from one model, with policy lag 2 and 0, and by TRL with the same loss:
           seconds to 95 % of the held-out questions, from the first batch and from the process's
           start, and accuracy after as many batches; with the small engine
    lag_sweep  the same by max_policy_lag 0, 1, 2, 4 and 8, without TRL
    heavy_tail  trained tokens/s with policy lag 8 over 0, where the number of turns of an episode
           is a log-normal draw (sigma 1)
    slow_tool  the same where a tool takes one second between the two turns of every episode
    models  models of 8 M and 30 M parameters (with --full of 100 M too), completions of up to 128
           tokens, vLLM: policy lag 2 and 0 beside TRL with transformers' generation and with vLLM
    real   a pretrained model on word problems, policy lag 2, 1 and 0 beside TRL with transformers'
           generation and with vLLM: speeds, and held-out accuracy by batches and seconds; never
           by default. Wants --model, and --folder to be continued; hours
    watching  CPU per trained token of the demo with pages of metrics that are read and sampled
           texts, over neither
    tracing  the same with traces of a tenth and of all episodes, over none; and what a span costs
           where it is made

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger. The
default runs `actor` in short windows, in less than two minutes; numbers to quote come from
`--full`, with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ring.engines import CASES, engines
from benchmarks.ring.lag_sweep import lag_sweep
from benchmarks.ring.learning import learning
from benchmarks.ring.models import ENGINES, MODELS, models
from benchmarks.ring.race import FULL_RACE, SHORT_RACE, Race, race
from benchmarks.ring.real import BATCHES, TRLS, real
from benchmarks.ring.slow_episodes import ENVIRONMENTS, slow_episodes
from benchmarks.ring.start import start
from benchmarks.ring.tracing import tracing
from benchmarks.ring.trl.comparison import beside_trl, limit_of_vllm
from benchmarks.ring.watching import watching
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import Say, say_since
from benchmarks.support.workload import LONGER

ARMS = (
    "actor",
    "short",
    "async",
    "trl",
    "engines",
    "start",
    "learning",
    "lag_sweep",
    *ENVIRONMENTS,
    "models",
    "real",
    "watching",
    "tracing",
)
DEFAULT = ("actor",)
REAL_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Size:
    """How long the arms measure."""

    passes: int
    window_s: float
    race: Race
    batches: int
    trl_rounds: int
    trl_steps: int
    starts: int
    seeds: int
    """Of runs that are compared by what they learn."""
    slow_rounds: int
    models: tuple[str, ...]
    watched: tuple[int, int]
    """Rounds, and batches of a run."""


SHORT = Size(
    2,
    4.0,
    SHORT_RACE,
    batches=20,
    trl_rounds=1,
    trl_steps=10,
    starts=1,
    seeds=1,
    slow_rounds=1,
    models=("8m", "30m"),
    watched=(1, 15),
)
FULL = Size(
    10,
    5.0,
    FULL_RACE,
    batches=60,
    trl_rounds=3,
    trl_steps=40,
    starts=5,
    seeds=5,
    slow_rounds=3,
    models=("8m", "30m", "100m"),
    watched=(8, 120),
)


def main() -> None:
    """Run the chosen arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="numbers to quote; a quarter of an hour"
    )
    parser.add_argument("--only", action="append", choices=ARMS, help="may be given again")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here")
    parser.add_argument("--model", type=Path, help="folder of a chat model, for `real`")
    parser.add_argument("--batches", type=int, default=BATCHES, help="of each run of `real`")
    chosen = parser.parse_args()
    names = chosen.only or ([arm for arm in ARMS if arm != "real"] if chosen.full else DEFAULT)
    if "real" in names and chosen.model is None:
        parser.error("--only real must have --model FOLDER, a Hugging Face chat model")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="nyala-ring-") as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        size = FULL if chosen.full else SHORT
        arms = measure(folder, size, names)
        if "real" in names:
            arms |= real(
                folder,
                model=chosen.model.resolve(),
                seeds=REAL_SEEDS if chosen.full else 1,
                batches=chosen.batches,
                say=say_since(time.monotonic()),
            )
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def measure(folder: Path, size: Size, names: Sequence[str]) -> dict[str, Any]:
    """Run arms one after the other."""
    say = say_since(time.monotonic())
    arms: dict[str, Any] = {}
    for name, suffix, overrides in (("actor", "", LONGER), ("short", "_short", ())):
        if name in names:
            from benchmarks.ring.actor_arm import compare  # imports torch

            arms |= compare(
                folder,
                passes=size.passes,
                window_s=size.window_s,
                say=say,
                suffix=suffix,
                overrides=overrides,
            )
    if "async" in names:
        arms |= race(folder, size.race, say=say)
    if "trl" in names:
        rounds, steps = size.trl_rounds, size.trl_steps
        arms |= beside_trl(folder, rounds=rounds, batches=size.batches, steps=steps, say=say)
    if "engines" in names:
        arms |= engines(folder, rounds=size.trl_rounds, batches=size.batches, say=say)
    if "start" in names:
        arms |= start(folder, passes=size.starts, say=say)
    return arms | _measure_training(folder, size, names, say)


def _measure_training(folder: Path, size: Size, names: Sequence[str], say: Say) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    if "learning" in names:
        arms |= learning(folder, seeds=size.seeds, say=say)
    if "lag_sweep" in names:
        arms |= lag_sweep(folder, seeds=size.seeds, say=say)
    if slow := [name for name in ENVIRONMENTS if name in names]:
        arms |= slow_episodes(folder, slow, rounds=size.slow_rounds, batches=size.batches, say=say)
    if "models" in names:
        arms |= models(folder, size.models, rounds=size.slow_rounds, threads=(1, 2), say=say)
    return arms | _costs(folder, size.watched, names, say)


def _costs(
    folder: Path, watched: tuple[int, int], names: Sequence[str], say: Say
) -> dict[str, Any]:
    """Run the arms that compare a run with the same one unseen."""
    (rounds, batches), arms = watched, dict[str, Any]()
    for name, cost in (("watching", watching), ("tracing", tracing)):
        if name in names:
            arms |= cost(folder, rounds=rounds, batches=batches, say=say)
    return arms


def ratios(arms: dict[str, Any]) -> dict[str, float | None]:
    """Divide; None where a side is missing or did not get there."""

    def ratio(top: str, bottom: str, figure: str) -> float | None:
        above, below = (arms.get(name, {}).get(figure) for name in (top, bottom))
        return round(above / below, 3) if above and below else None

    def limit(top: str, bottom: str) -> float | None:
        """Return what the ratio would be if in the asynchronous arm nobody ever waited."""
        least, took = arms.get(top, {}).get("least_batch_s"), arms.get(bottom, {}).get("batch_s")
        return round(took / least, 3) if least and took else None

    return {
        "actor_over_bare_engine": ratio("actor", "bare_engine", "tokens_per_s"),
        "actor_over_bare_engine_per_cpu_s": ratio("actor", "bare_engine", "tokens_per_cpu_s"),
        "actor_over_bare_core": ratio("actor", "bare_core", "tokens_per_s"),
        "actor_over_bare_engine_short": ratio("actor_short", "bare_engine_short", "tokens_per_s"),
        "actor_over_bare_engine_short_per_cpu_s": ratio(
            "actor_short", "bare_engine_short", "tokens_per_cpu_s"
        ),
        "actor_over_bare_core_short": ratio("actor_short", "bare_core_short", "tokens_per_s"),
        # The time of the other arm on top: how many times sooner the asynchronous one is there.
        "async_over_sync_time": ratio("sync", "async", "time_s"),
        "async_over_sync_tokens_per_cpu_s": ratio("async", "sync", "tokens_per_cpu_s"),
        "time_to_accuracy_over_trl": ratio("trl_dapo", "lag_2", "from_first_batch_s"),
        "time_to_accuracy_over_trl_from_start": ratio("trl_dapo", "lag_2", "from_start_s"),
        "time_to_accuracy_over_trl_2_threads": ratio(
            "trl_dapo_2_threads", "lag_2", "from_first_batch_s"
        ),
        **{
            f"async_over_sync_{name}": ratio(f"{name}_async", f"{name}_sync", "tokens_per_s")
            for name in ENVIRONMENTS
        },
        **{
            f"limit_of_async_over_sync_{name}": limit(f"{name}_async", f"{name}_sync")
            for name in ENVIRONMENTS
        },
        **{
            f"over_{peer}_tokens_per_{unit}_{name}": ratio(
                f"lag_2_{name}", f"{peer}_{name}", f"tokens_per_{unit}"
            )
            for name in MODELS
            for peer in ENGINES
            for unit in ("s", "cpu_s")
        },
        **{
            f"small_engine_over_vllm_tokens_per_{unit}_{name}": ratio(
                f"torch_{name}", f"vllm_{name}", f"tokens_per_{unit}"
            )
            for name in CASES
            for unit in ("s", "cpu_s")
        },
        **{
            f"async_over_sync_{name}": ratio(f"lag_2_{name}", f"lag_0_{name}", "tokens_per_s")
            for name in MODELS
        },
        **{
            f"real_over_{name}_{figure}": ratio("real_lag_2", f"real_{name}", figure)
            for name in TRLS
            for figure in ("tokens_per_s", "tokens_per_cpu_s")
        },
        "over_trl_tokens_per_cpu_s": ratio("ring", "trl", "tokens_per_cpu_s"),
        "over_trl_tokens_per_cpu_s_vllm": ratio("ring_vllm", "trl", "tokens_per_cpu_s"),
        "limit_of_over_trl_tokens_per_cpu_s_vllm": limit_of_vllm(
            *(arms.get(name, {}) for name in ("ring_vllm", "bare_engine_short", "trl"))
        ),
        # What TRL itself keeps of its rate per CPU second once the other processor computes too.
        "trl_twice_over_trl_tokens_per_cpu_s": ratio("trl_twice", "trl", "tokens_per_cpu_s"),
        "over_trl_tokens_per_s": ratio("ring", "trl", "tokens_per_s"),
        "over_trl_tokens_per_s_vllm": ratio("ring_vllm", "trl", "tokens_per_s"),
        "over_trl_tokens_per_s_2_threads": ratio("ring", "trl_2_threads", "tokens_per_s"),
    }


if __name__ == "__main__":
    main()
