"""The cost of dying actors: whole runs side by side, undisturbed or with killed actors.

`nyala chaos --kill-run` and `--long` make them.

    none    the run as it is
    start   every `every_s` one more actor starts, and leaves as soon as it serves
    kill    every `every_s` one of several actors is killed, for the whole length
    drain   every `every_s` one of several actors is drained, for the whole length

All arms begin with the same model and see the same tasks. An actor that ends is replaced at once.
The next actor is hurt when the replacement serves, `every_s` after the last at the earliest.

A rate outside of engine start-up is measured twice: against `start` in wall time, because both arms
pay for as many starts, and against `none` in CPU time, without the time of the starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np

import configs
from buffer import operations
from buffer.operations.values import TaskSeen
from configs.errors import StoreError
from configs.json_lines import number, read_rows
from console.run.process_guard import ProcessGuard
from console.run.run_folder import RunState

from .actor_fleet import CpuTime, cpu_s
from .live_run import LiveRun
from .matrix import GUARD_S
from .task_trace import Observer, TaskTrace

# --------------------------------------------------------------------------------------------------
# One arm of the kill runs: a whole run, undisturbed or disturbed at a fixed pace, and its figures.
#
#     undisturbed:  actors serve --------------------------------------------------> end
#     starts:       actors serve; one more starts, and leaves when it serves; again -> end
#     kill, drain:  actors serve; one goes; its replacement starts and serves; again -> end
#
# The engine of a replacement takes cores from the run while it starts. The second arm pays for the
# same starts and loses no actor: the loss of other arms against it is the price of dying actors.
#
# The output of a killed actor is estimated from its heartbeats: its last count in the store, and
# its rate since then.

LOOK_S = 0.02
ACTORS_S = 0.5
END_S = 3600.0
VISITOR = "console.refresh_s=0.5"
"""A setting without effect on an actor: an actor with settings of its own is not replaced."""


class Harm(StrEnum):
    """The repeated disturbance of an arm's actors."""

    NONE = "none"
    START = "start"
    KILL = "kill"
    DRAIN = "drain"


@dataclass(slots=True)
class Arm:
    """Figures of one run."""

    harm: Harm
    harmed: int = 0
    """Actors killed, drained, or started for nothing."""
    moved_s: list[float] = field(default_factory=list)
    """Time until another actor had each of their tasks, from the kill, or, for an actor that
    drained, from the release of the task."""
    lost: int = 0
    """Number of their tasks that no other actor continued."""
    startup_s: list[float] = field(default_factory=list)
    """Time until each actor that started during the run served."""
    startup_cpu_s: float = 0.0
    """CPU time of these actors until they served."""
    cpu_s: float = 0.0
    """CPU time of all processes of the run since the first disturbance, with start-ups."""
    sampled: dict[str, float] = field(default_factory=dict)
    """Tokens sampled, by incarnation."""
    summary: dict[str, float] = field(default_factory=dict)
    trained_tokens: float = 0.0
    tokens_in_window: float = 0.0
    """Trained tokens of the batches after the first one that was trained under observation."""
    wall_s: float = 0.0
    """Time from that batch to the last."""

    @property
    def generated_tokens(self) -> float:
        """Tokens that all actors have sampled, including evaluation and unfinished episodes."""
        return sum(self.sampled.values())


class Watcher:
    """Follows a run to its end and harms its actors."""

    def __init__(
        self, run: LiveRun, arm: Arm, *, every_s: float, on_step: Callable[[int], None]
    ) -> None:
        self._run = run
        self._arm = arm
        self._every_s = every_s
        self._on_step = on_step
        self._traces: list[tuple[float, TaskTrace]] = []
        self._used = CpuTime()
        self._leaving: set[str | None] = set()
        """Incarnations that were drained or killed."""

    def follow(self) -> None:
        """Watch, disturb and count until the run has finished.

        Raises:
            FileNotFoundError: The run has not finished within an hour.
        """
        run, arm = self._run, self._arm
        self._used.note(run.all_pids)
        used_before_s, began_at = self._used.total_s, time.time()
        began = next_harm = time.monotonic()
        next_harm += self._every_s
        count_at = 0.0
        while run.folder.state is not RunState.FINISHED:
            now = time.monotonic()
            if now - began > END_S:
                break
            if now >= count_at:
                self._count()
                count_at = now + ACTORS_S
            if arm.harm is not Harm.NONE and now >= next_harm and self._harm():
                next_harm = max(next_harm + self._every_s, now)
            self._look(now)
            run.fleet.refill()
            time.sleep(LOOK_S)
        for harmed_at, trace in self._traces:
            self._note_end(harmed_at, trace)
        starting = [a for a in run.fleet.actors if a.serving_at is None]
        arm.startup_cpu_s += sum(cpu_s(actor.pid) for actor in starting)
        arm.cpu_s = self._used.total_s - used_before_s
        self._read(began_at)

    def _harm(self) -> bool:
        """Disturb the actor that has most leases; False if no actor is at work."""
        actors = self._run.fleet.actors
        if any(a.serving_at is None or a.incarnation in self._leaving for a in actors):
            return False  # one at a time: the last replacement does not serve yet
        if self._arm.harm is Harm.START:
            self._run.fleet.add(VISITOR)
            self._arm.harmed += 1
            return True
        held = Counter(task.incarnation for task in self._leased())
        victim = max(actors, key=lambda actor: held[actor.incarnation or ""])
        if not held[victim.incarnation or ""]:
            return False  # a fast engine is often idle, and must be hurt in the middle of its work
        self._arm.harmed += 1
        self._leaving.add(victim.incarnation)
        os.kill(victim.pid, signal.SIGSTOP if self._arm.harm is Harm.KILL else signal.SIGTERM)
        mine = [task for task in self._leased() if task.incarnation == victim.incarnation]
        now = time.monotonic()
        self._traces.append((now, TaskTrace.from_tasks(mine, Observer(0.0), now)))
        if self._arm.harm is Harm.KILL:
            os.kill(victim.pid, signal.SIGKILL)
        return True

    def _leased(self) -> list[TaskSeen]:
        try:
            return list(self._run.store.run(operations.inspect()).values())
        except StoreError:
            return []

    def _look(self, now: float) -> None:
        """Read the tasks of the victims, until they have moved."""
        open_traces = []
        for began_at, trace in self._traces:
            ids = trace.open_ids
            if not ids:
                self._note_end(began_at, trace)
                continue
            open_traces.append((began_at, trace))
            try:
                trace.note_open(self._run.store.run(operations.inspect(ids)), now)
            except StoreError:
                continue
        self._traces = open_traces

    def _note_end(self, began_at: float, trace: TaskTrace) -> None:
        for task in trace.tasks.values():
            if task.moved_at is not None:
                freed_at = task.freed_at if self._arm.harm is Harm.DRAIN else None
                self._arm.moved_s.append(task.moved_at - (freed_at or began_at))
            elif not task.settled:
                self._arm.lost += 1

    def _count(self) -> None:
        """Read the tokens and CPU time of the actors, and the progress of the run."""
        run, arm = self._run, self._arm
        self._used.note(run.all_pids)
        starting = [actor for actor in run.fleet.actors if actor.serving_at is None]
        run.fleet.all_serve()
        for actor in starting:
            if actor.serving_at is None:
                continue
            arm.startup_s.append(actor.serving_at - actor.started_at)
            arm.startup_cpu_s += cpu_s(actor.pid)
            if arm.harm is Harm.START:
                self._leaving.add(actor.incarnation)
                actor.process.ask_to_stop()
        try:
            for seen in run.store.run(operations.actors()):
                tokens, rate = (float(seen.fields.get(n, 0)) for n in ("tokens", "tokens_per_s"))
                silent_s = min(seen.silent_s, run.settings.broker.heartbeat_timeout_s)
                has_ended = seen.incarnation not in {a.incarnation for a in run.fleet.actors}
                # A dead actor samples no more; a live actor is counted at the next reading.
                before = arm.sampled.get(seen.incarnation, 0.0)
                guess = 0.0 if has_ended else rate * min(silent_s, 1.0)
                arm.sampled[seen.incarnation] = max(before, tokens + guess)
        except StoreError:
            return
        self._on_step(len(read_rows(run.folder.metrics)))

    def _read(self, began_at: float) -> None:
        """Read the files of the finished run."""
        rows = read_rows(self._run.folder.metrics)
        arm, folder = self._arm, self._run.folder
        arm.summary = folder.read_summary()
        arm.trained_tokens = sum(number(row, "trained_tokens") for row in rows)
        first, *window = [row for row in rows if number(row, "time") >= began_at]
        arm.tokens_in_window = sum(number(row, "trained_tokens") for row in window)
        arm.wall_s = number(rows[-1], "time") - number(first, "time")


# --------------------------------------------------------------------------------------------------
# The cost of dying actors: whole runs side by side, undisturbed or with killed actors.

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
        """The settings file of the runs and its overrides."""
        demo = Path(configs.__file__).parent / "demo.yaml"
        usual = () if self.config is not None else USUAL
        engine = f"actors.engine={self.engine}"
        return self.config or demo, (*NEEDED, *usual, engine, *self.overrides)


def kill_runs(plan: KillPlan, on_step: Callable[[Harm, int, int], None]) -> dict[str, object]:
    """Run the arms one after the other; write `kill_run.json` after each, and return what it has.

    Raises:
        ExpectationFailed: A run could not be started.
    """
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
