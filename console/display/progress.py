"""Progress of a run, read from the files that it writes: figures, stages, errors, newest sample.

`nyala up`, `top`, `status` and other verbs show it.

A learner that resumes from a checkpoint replaces the files by shorter ones, which are then read
from their beginning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import msgspec

from configs.errors import NyalaError, StoreError
from configs.json_lines import JsonLinesFollower, Row, number, parse
from configs.settings import Settings
from console.run.run_folder import RunFolder
from learner.data.grades import HeldOut, held_out
from learner.phase_names import PHASES
from learner.reporting.run_snapshot import RECENT, RunSnapshot
from learner.reporting.samples import SampleLine

# --------------------------------------------------------------------------------------------------
# The advice in a line of metrics, or in a summary.


def advice_in(line: Mapping[str, object]) -> dict[str, str]:
    """Read the advice in a line: rule -> sentence, causes first; empty where there is none."""
    advice = line.get("advice")
    entries = (
        [entry for entry in advice if isinstance(entry, dict)] if isinstance(advice, list) else []
    )
    return {
        str(entry["rule"]): str(entry["text"]) for entry in entries if {"rule", "text"} <= {*entry}
    }


# --------------------------------------------------------------------------------------------------
# The cause in a line of a log.

LONGEST_CAUSE = 500  # characters: a screenful, whatever an error has in it


def cause_in(row: Row) -> str:
    """Return the event of an error with its reason, or with the last line of its traceback."""
    event = str(row.get("event", ""))
    trace = [line.lstrip(" |+-") for line in str(row.get("exception", "")).splitlines()]
    reason = str(row.get("reason", "")) or next(filter(None, reversed(trace)), "")
    return f"{event}: {reason}"[:LONGEST_CAUSE] if reason else event


# --------------------------------------------------------------------------------------------------
# Stages of each process while it starts with their seconds, and its newest error, from its log.

LASTING = {"hosting agents", "listening", "sampling"}
"""Stages of a process that has started: they last as long as it does."""
TAIL_BYTES = 64 * 1024  # of a log: stages are logged while there is little else


@dataclass(frozen=True, slots=True)
class ProcessStage:
    """The activity of a process at one moment."""

    name: str
    at: float
    """When it began, Unix time."""


class Stages:
    """Follows the logs, from their present ends on, for lines with a `stage`, and for errors."""

    def __init__(self, logs: Mapping[str, Path], *, clock: Callable[[], float] = time.time) -> None:
        # Logs of an earlier life are not read again: only what this `nyala up` causes is news.
        self._logs = {name: JsonLinesFollower(path) for name, path in logs.items()}
        for follower in self._logs.values():
            follower.skip_to_end()
        self._stages = dict.fromkeys(logs, "starting")
        self._errors: dict[str, str] = {}
        self._clock = clock
        self._began = clock()
        # Until `report`: the stages of what is started again later would only take memory.
        self._begun: dict[str, list[tuple[str, float]]] | None = {
            name: [("starting", self._began)] for name in logs
        }

    def read_stages(self) -> Mapping[str, str]:
        """Return process name -> its newest stage, `starting` before the first."""
        for name, follower in self._logs.items():
            for row in follower.read_new():
                if "stage" in row:
                    self._stages[name] = str(row["stage"])
                    if self._begun is not None:
                        self._begun[name].append((str(row["stage"]), self._time(row)))
                if row.get("level") in {"error", "critical"}:
                    self._errors[name] = cause_in(row)
        return self._stages

    @property
    def elapsed_s(self) -> float:
        """Time since the beginning."""
        return max(0.0, self._clock() - self._began)

    def report(self) -> list[str]:
        """Return the time since the beginning, then each process's stages; once, empty later."""
        self.read_stages()
        begun, self._begun = self._begun, None
        if begun is None:
            return []
        now = self._clock()
        lines = [f"first batch after {now - self._began:.1f} s"]
        for name, stages in begun.items():
            spans = pairwise([*stages, ("", now)])
            spent = [
                stage if stage in LASTING else f"{stage} {max(0.0, end - start):.1f} s"
                for (stage, start), (_, end) in spans
            ]
            lines.append(f"{name}: {', '.join(spent)}")
        return lines

    def take_error(self, name: str) -> str | None:
        """Return the newest error that a process wrote since the last call."""
        self.read_stages()
        return self._errors.pop(name, None)

    def _time(self, row: Row) -> float:
        return _time(row) or self._clock()


def newest_stage(log: Path) -> ProcessStage | None:
    """Read the newest stage in the end of a log; None if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).split(b"\n")
    for line in reversed(lines):
        if b'"stage"' in line and (row := parse(line)) is not None and "stage" in row:
            return ProcessStage(str(row["stage"]), _time(row) or 0.0)
    return None


def _time(row: Row) -> float | None:
    try:
        return datetime.fromisoformat(str(row.get("timestamp"))).timestamp()
    except ValueError:
        return None


# --------------------------------------------------------------------------------------------------
# Progress of a run, from the files that the learner writes: pure arithmetic on their lines.


@dataclass(frozen=True, slots=True)
class Progress:
    """Figures of a run at one moment; None = not available yet."""

    step: int
    steps: int
    reward: float | None = None
    """Mean sampled reward of the last batches."""
    held_out: HeldOut | None = None
    """Newest score of held-out answers, greedy."""
    held_out_before: HeldOut | None = None
    """That of the model that the run began with."""
    scores: dict[str, float] = field(default_factory=dict)
    """Newest score of each environment, where there are several."""
    tokens_per_s: float | None = None
    """Generated tokens that reached the learner, over the last batches."""
    trained_tokens_per_s: float | None = None
    """Tokens with a loss, over the last batches; tokens trained again count again."""
    policy_lag: float | None = None
    """Mean lag of the newest batch, batches."""
    policy_lag_max: int | None = None
    """Largest lag of a token of the newest batch, batches."""
    fresh_trained: float | None = None
    """Share of the fresh tokens of the newest batch that were trained."""
    idle_fraction: float | None = None
    """Share of the last batches' time in which the learner waited for episodes."""
    phases: dict[str, float] = field(default_factory=dict)
    """Share of the last batches' time in each of the learner's phases, the largest first."""
    mfu: float | None = None
    """Share of the cards' peak in the newest batch."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups of the whole run that were not trained, by reason."""
    eta_s: float | None = None
    alerts: str | None = None
    """Newest findings of the guards among the last batches, such as `ess, kl at batch 57`."""
    advice: Mapping[str, str] = field(default_factory=dict)
    """Rule -> sentence, of the newest batch."""
    actors_wanted: int | None = None
    """Actors that the run wants."""
    actors_wanted_why: str = ""
    cost: float | None = None
    """Cost of all actors so far, where they have a price."""
    rewards: tuple[float, ...] = ()
    """Mean sampled reward of all batches, in equal stretches."""
    score_curve: tuple[float, ...] = ()
    """Score of all evaluations, in equal stretches."""


class RunProgress:
    """Follows `metrics.jsonl` and `eval.jsonl` of a run folder."""

    def __init__(self, folder: RunFolder, *, steps: int) -> None:
        self._metrics = JsonLinesFollower(folder.metrics)
        self._evaluations = JsonLinesFollower(folder.evaluations)
        self._steps = steps
        self._run_snapshot = RunSnapshot()

    def read_progress(self) -> Progress:
        """Read what is new in both files, and return the figures of the run."""
        run_snapshot = self._run_snapshot
        while rows := self._read(self._metrics, run_snapshot.forget_batches):
            for row in rows:
                run_snapshot.add_batch(row)
        while rows := self._read(self._evaluations, run_snapshot.forget_evaluations):
            for row in rows:
                run_snapshot.add_evaluation(row)
        return progress_of(run_snapshot, steps=self._steps)

    @property
    def newest_at(self) -> float:
        """Return when the newest batch was trained, Unix time; 0 before the first."""
        return newest_at(self._run_snapshot)

    @staticmethod
    def _read(lines: JsonLinesFollower, forget: Callable[[], None]) -> list[Row]:
        """Return new rows; call `forget` first if a shorter file has replaced the earlier one."""
        lives = lines.num_files
        rows = lines.read_new()
        if lines.num_files != lives:
            forget()
        return rows


def stopped_line(folder: RunFolder, *, steps: int) -> str:
    """Write since when a run is stopped, at which batch, and the command that continues it."""
    since = datetime.fromtimestamp(folder.last_sign_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    step = RunProgress(folder, steps=steps).read_progress().step
    place = f"at batch {step} of {steps}" if step else "before its first batch"
    kept = folder.newest_checkpoint() or "its beginning"
    return (
        f"not running: stopped since {since} {place}; to go on from {kept}: "
        f"`nyala up {folder.path}`"
    )


@contextmanager
def naming_a_stop(folder: RunFolder, settings: Settings) -> Iterator[None]:
    """Replace an error of the store by one that says that the run is stopped, where it is.

    Raises:
        NyalaError: The run is stopped.
        StoreError, OSError: The error of the body, where the run is not stopped.
    """
    try:
        yield
    except (StoreError, OSError) as error:
        if not folder.is_stopped:
            raise
        raise NyalaError(
            f"{settings.run.name} must be running for its store to be read, got a run that is "
            f"{stopped_line(folder, steps=settings.run.steps)}"
        ) from error


def progress_of(run_snapshot: RunSnapshot, *, steps: int) -> Progress:
    """Sum up the figures of a run that trains so many batches."""
    ends = run_snapshot.evaluations
    results = {int(number(row, "step")): result for row in ends if (result := held_out(row))}
    return replace(
        summarise(run_snapshot.batches, results, steps=steps),
        scores=scores_in(ends[-1]) if ends else {},
        rewards=run_snapshot.rewards.points,
        score_curve=run_snapshot.scores.points,
    )


def newest_at(run_snapshot: RunSnapshot) -> float:
    """Return when the newest batch was trained, Unix time; 0 before the first."""
    batches = run_snapshot.batches
    return number(batches[-1], "time") if batches else 0.0


def summarise(rows: list[Row], results: Mapping[int, HeldOut], *, steps: int) -> Progress:
    """Sum up the metrics of a run, oldest row first.

    Args:
        rows: Lines of `metrics.jsonl`, one for each step; the newest `RECENT` are looked at.
        results: Step -> result of its evaluation.
        steps: Batches of the whole run.
    """
    before = results[min(results)] if results else None
    newest = results[max(results)] if results else None
    if not rows:
        return Progress(0, steps, held_out=newest, held_out_before=before)
    recent = rows[-RECENT:]
    step = int(number(rows[-1], "step"))
    wall_s = sum(_durations(recent))
    is_timed = wall_s > 0
    timed = recent[-len(_durations(recent)) :]
    return Progress(
        step=step,
        steps=steps,
        reward=sum(number(row, "reward_mean") for row in recent) / len(recent),
        held_out=newest,
        held_out_before=before,
        tokens_per_s=sum(number(row, "completion_tokens") for row in timed) / wall_s
        if is_timed
        else None,
        trained_tokens_per_s=sum(number(row, "trained_tokens") for row in timed) / wall_s
        if is_timed
        else None,
        policy_lag=number(rows[-1], "policy_lag_mean"),
        policy_lag_max=int(number(rows[-1], "policy_lag_max")),
        fresh_trained=number(rows[-1], "fresh_trained_fraction", default=1.0),
        idle_fraction=min(1.0, sum(number(row, "wait_s") for row in timed) / wall_s)
        if is_timed
        else None,
        phases=phase_shares(recent),
        mfu=number(rows[-1], "mfu") or None,
        dropped=_dropped(rows[-1]),
        eta_s=(steps - step) * wall_s / len(timed) if is_timed else None,
        alerts=_newest_alerts(recent),
        advice=advice_in(rows[-1]),
        **_actors_wanted(rows[-1]),
    )


def scores_in(evaluation: Row) -> dict[str, float]:
    """Read the score of each environment from a line of `eval.jsonl`; none if there is one."""
    environments = evaluation.get("environments")
    if not isinstance(environments, dict) or len(environments) < 2:
        return {}
    results = {name: held_out(figures) for name, figures in environments.items()}
    return {name: result.score for name, result in results.items() if result is not None}


def phase_shares(rows: list[Row]) -> dict[str, float]:
    """Sum up the seconds of batches by phase, as shares, the largest first."""
    spent = {name: sum(number(row, f"{name}_s") for row in rows) for name in PHASES}
    total = sum(spent.values())
    largest = sorted(spent.items(), key=lambda phase: -phase[1])
    return {name: seconds / total for name, seconds in largest if seconds}


class _ActorsWanted(TypedDict):
    actors_wanted: int | None
    actors_wanted_why: str
    cost: float | None


def _actors_wanted(row: Row) -> _ActorsWanted:
    why = str(row.get("actors_wanted_why", ""))
    cost = row.get("cost")
    return {
        "actors_wanted": int(number(row, "actors_wanted")) or None,
        "actors_wanted_why": why,
        "cost": cost if isinstance(cost, float) else None,
    }


def _dropped(row: Row) -> dict[str, int]:
    """Read how many groups were dropped, by reason."""
    groups = row.get("dropped_groups")
    if not isinstance(groups, dict):
        return {}
    return {str(why): count for why, count in groups.items() if isinstance(count, int) and count}


def _newest_alerts(rows: list[Row]) -> str | None:
    for row in reversed(rows):
        names = row.get("alerts")
        if isinstance(names, list) and names:
            return f"{', '.join(map(str, names))} at batch {number(row, 'step'):.0f}"
    return None


def _durations(rows: list[Row]) -> list[float]:
    """Return the seconds between neighbouring steps, without restarts, which set `wall_s` back."""
    walls = [number(row, "wall_s") for row in rows]
    return [max(0.0, after - before) for before, after in pairwise(walls)]


# --------------------------------------------------------------------------------------------------
# The newest sampled text of a run, followed while the learner writes.

READ_BYTES = 4 * 2**20  # a text of 128k tokens with its log-probs is a fifth of it


class NewestSample:
    """Reads the last line of `samples.jsonl` when the file has grown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._sample: SampleLine | None = None

    def read_newest(self) -> SampleLine | None:
        """Return the newest sample that can be read; None before the first.

        A line of more than 4 MiB is not read.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, status.st_size) == self._seen:
                    return self._sample
                self._seen = status.st_ino, status.st_size
                file.seek(max(0, status.st_size - READ_BYTES))
                lines = file.read(READ_BYTES).split(b"\n")
        except FileNotFoundError:
            return self._sample
        for line in reversed(lines):  # the last one may still be being written
            try:
                self._sample = msgspec.json.decode(line, type=SampleLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            break
        return self._sample
