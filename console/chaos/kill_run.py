"""The cost of dying actors: whole runs side by side, one undisturbed, one whose actors are killed.

    none    the run as it is
    start   every `every_s` one more actor starts, and leaves as soon as it serves
    kill    every `every_s` one of several actors is killed, for the whole length
    drain   every `every_s` one of several actors is drained, for the whole length

All arms begin with the same model and see the same tasks. An actor that ends is replaced at once,
and the next is hurt when its replacement serves, `every_s` after the last at the earliest.

A rate outside of engine start-up is measured twice. Against `start`, in wall time: both arms pay
for as many starts. Against `none`, in CPU time: what the starts used is taken away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import configs
from console.run.process_guard import ProcessGuard

from .arms import Arm, Harm, Watcher
from .live_run import LiveRun
from .matrix import GUARD_S

NEEDED = (
    "buffer.url=null",
    "actors.count=0",
    "broker.endpoint=tcp://127.0.0.1:0",
    "console.max_restarts=1000",
)
USUAL = (
    "actors.engine=torch",
    "actors.heartbeat_s=0.5",
    "actors.snapshot_s=0.2",
    "actors.max_concurrent_episodes=64",
    "broker.lease_timeout_s=3",
)
"""demo.yaml with the small engine, and leases short enough for kills every ten seconds."""

KILL_EVERY_S = {"torch": 10.0, "vllm": 60.0}
NUM_ACTORS = 3


@dataclass(frozen=True, slots=True)
class KillPlan:
    """Options of the kill runs."""

    folder: Path
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    engine: str = "torch"
    harms: tuple[Harm, ...] = tuple(Harm)

    @property
    def settings(self) -> tuple[Path, tuple[str, ...]]:
        """The settings file of the runs and what is changed in it."""
        demo = Path(configs.__file__).parent / "demo.yaml"
        usual = () if self.config is not None else USUAL
        engine = f"actors.engine={self.engine}"
        return self.config or demo, (*NEEDED, *usual, engine, *self.overrides)


def kill_runs(plan: KillPlan, on_step: Callable[[Harm, int, int], None]) -> dict[str, object]:
    """Run the arms one after the other; writes `kill_run.json` after each."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    arms: dict[Harm, Arm] = {}
    for harm in plan.harms:
        arms[harm] = _run_arm(plan, harm, on_step)
        result = compare(arms)
        text = json.dumps(result, indent=1) + "\n"
        (plan.folder / "kill_run.json").write_text(text, encoding="utf-8")
    return compare(arms)


def compare(arms: dict[Harm, Arm]) -> dict[str, object]:
    """Put the figures of the arms side by side, with their ratios to the undisturbed ones."""
    figures = {harm: _figures(arm) for harm, arm in arms.items()}
    for harm in (Harm.KILL, Harm.DRAIN):
        for base, key, name in (
            (Harm.NONE, "trained_over_generated", "trained_over_generated_ratio"),
            (Harm.NONE, "tokens_per_s", "tokens_per_s_ratio"),
            (Harm.NONE, "tokens_per_cpu_s_outside_startup", "outside_startup_cpu_ratio"),
            (Harm.START, "tokens_per_s", "outside_startup_wall_ratio"),
        ):
            if harm in figures and base in figures:
                mine, theirs = figures[harm][key], figures[base][key]
                assert mine is not None and theirs, "every run trains"
                figures[harm][name] = round(mine / theirs, 3)
    return {"arms": {harm.value: values for harm, values in figures.items()}}


def _figures(arm: Arm) -> dict[str, float | None]:
    summary = arm.summary
    created = float(summary["tasks_created"] - summary["tasks_cancelled"])
    return {
        "accuracy_before": summary["held_out_accuracy_before"],
        "accuracy_after": summary["held_out_accuracy_after"],
        "harmed_actors": arm.harmed,
        "trained_tokens": arm.trained_tokens,
        "generated_tokens": round(arm.generated_tokens),
        "trained_over_generated": round(arm.trained_tokens / arm.generated_tokens, 4),
        "wall_s": round(arm.wall_s, 1),
        "cpu_s": round(arm.cpu_s, 1),
        "starts": len(arm.startup_s),
        "startup_s_p50": _quantile(arm.startup_s, 0.5),
        "startup_cpu_s": round(arm.startup_cpu_s, 1),
        "tokens_per_s": round(arm.tokens_in_window / arm.wall_s, 1),
        "tokens_per_cpu_s_outside_startup": round(
            arm.tokens_in_window / (arm.cpu_s - arm.startup_cpu_s), 1
        ),
        "moved_tasks": len(arm.moved_s),
        "moved_s_p50": _quantile(arm.moved_s, 0.5),
        "moved_s_p99": _quantile(arm.moved_s, 0.99),
        "moved_s_max": _quantile(arm.moved_s, 1.0),
        "lost_tasks": arm.lost,
        "resumed_episodes": summary["resumed_episodes"],
        "dropped_share": round(summary["tasks_dropped"] / created, 5),
        "dead_tasks": summary["tasks_dead"],
        "policy_lag_mean": summary["policy_lag_mean"],
        "learner_idle_fraction": summary["learner_idle_fraction"],
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    return round(float(np.quantile(values, share)), 3) if values else None


def _run_arm(plan: KillPlan, harm: Harm, on_step: Callable[[Harm, int, int], None]) -> Arm:
    config, overrides = plan.settings
    folder = plan.folder / harm.value
    models = sorted(plan.folder.glob("*/init"))
    if models:  # one model for all arms
        shutil.copytree(models[0], folder / "init")
    arm = Arm(harm)
    with (
        closing(ProcessGuard(grace_s=GUARD_S)) as guard,
        closing(LiveRun(config, overrides, folder, guard)) as run,
    ):
        run.start(NUM_ACTORS)
        every_s = KILL_EVERY_S[plan.engine]
        steps = run.settings.run.steps
        Watcher(run, arm, every_s=every_s, on_step=lambda step: on_step(harm, step, steps)).follow()
    return arm
