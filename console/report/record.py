"""A run as its report shows it, read from its folder: actors' lives, answers, changed settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.run.run_folder import RunState, read_versions, run_folder_of
from learner.data.grades import LOG_LIKELIHOOD, AnswerMetric, metrics_of
from learner.reporting.figures import SUPERVISED_FILE
from learner.reporting.samples import SampleLine, read_samples

from .curves import (
    KEYS,
    MAX_ACTORS,
    Curves,
    EvaluationFigures,
    accumulated,
    add_derived,
    read_curves,
    read_evaluations,
)

# --------------------------------------------------------------------------------------------------
# Lives of actors: when each joined, and how it ended.
#
# Read from the broker's `logs/audit.jsonl`, and from the batches that trained an actor's episodes
# where that file has been trimmed or belongs to a broker of another machine.
#
#     joined -> left       it drained and took its leave
#     joined -> died       another took its place, it was silent for long, or no batch had an
#                          episode of it any more
#     joined -> (open)     it sampled until the end

GONE_AFTER = 5  # batches without an episode of it, beyond the policy lag: it no longer samples


class IncarnationEnd(StrEnum):
    """The way in which an actor's life ended."""

    LEFT = "left"
    DIED = "died"
    OPEN = "sampled until the end"


@dataclass(frozen=True, slots=True)
class ActorIncarnation:
    """One incarnation of an actor."""

    name: str
    began: float
    """Unix seconds."""
    ended: float
    end: IncarnationEnd
    episodes: int
    """Episodes that the actor finished and that were trained."""


def actor_lives(folder: Path, curves: Curves, *, max_policy_lag: int) -> list[ActorIncarnation]:
    """List the lives of a run's actors, the earliest first.

    Args:
        folder: Folder of the run.
        curves: Figures of the run.
        max_policy_lag: Batches for which episodes of an actor that has gone are still trained.
    """
    if not curves.steps:
        return []
    newest = curves.times[-1]
    time_of = dict(zip(curves.steps, curves.times, strict=True))
    joined: dict[str, float] = {}
    ended: dict[str, tuple[float, IncarnationEnd]] = {}
    for event, name, time in _events(folder / "logs" / "audit.jsonl"):
        if event == "actor joined" and (name in joined or len(joined) < MAX_ACTORS):
            joined[name] = time
            ended.pop(name, None)
        elif name in joined:
            ended[name] = (
                time,
                IncarnationEnd.LEFT if event == "actor left" else IncarnationEnd.DIED,
            )
    lives: list[ActorIncarnation] = []
    for name in joined.keys() | curves.actors.keys():
        seen = curves.actors.get(name)
        began = joined.get(name) or time_of.get(seen.first if seen else -1, curves.times[0])
        last = seen.last if seen else -1
        trained_at = max(began, time_of.get(last, began))
        time, end = ended.get(name, (math.inf, IncarnationEnd.OPEN))
        if time >= newest:  # with the run, or not at all
            is_gone = curves.steps[-1] - last > max_policy_lag + GONE_AFTER
            time = trained_at if is_gone and seen else newest
            end = IncarnationEnd.DIED if is_gone else IncarnationEnd.OPEN
        elif end is IncarnationEnd.DIED and seen:
            time = min(time, trained_at)  # noticed when another took its place
        lives.append(
            ActorIncarnation(name, began, max(began, time), end, seen.episodes if seen else 0)
        )
    return sorted(lives, key=lambda life: (life.began, life.name))


def _events(path: Path) -> Iterator[tuple[str, str, float]]:
    """Yield event, actor and Unix time of the lines about actors, the oldest first."""
    for log_path in (path.with_name(f"{path.name}.1"), path):
        if not log_path.exists():
            continue
        with log_path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    time = datetime.fromisoformat(str(row["time"])).timestamp()
                    event, actor = str(row["event"]), str(row["actor"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # of another kind, or half a line
                if event in {"actor joined", "actor left", "actor lost", "actor replaced"}:
                    yield event, actor, time


# --------------------------------------------------------------------------------------------------
# Answers to the same held-out questions, early and late in a run.
#
# The questions that are shown are drawn, not chosen: by digest, the first that became right, that
# became wrong and whose grade stayed, beside the number of each kind.

MAX_QUESTIONS = 4096  # of which two answers are held at a time
END_CHARACTERS = 900  # of a text: how it begins, and the answer at its end
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A greedy answer to a held-out question."""

    step: int
    """Batches that its policy was trained on."""
    grade: float
    """Grade by the metric of held-out answers; 1 = right."""
    reward: float
    text: str
    tokens: int
    finish: str


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """A question with an early and a late answer."""

    question: str
    prompt: str
    note: str
    """Text from the environment, such as the right answer."""
    early: GreedyAnswer
    late: GreedyAnswer


@dataclass(slots=True)
class AnswerChanges:
    """How the answers to the questions of a run changed."""

    first: int = 0
    last: int = 0
    """The steps of the two evaluations."""
    better: int = 0
    worse: int = 0
    same: int = 0
    shown: list[AnswerChange] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """Write how many answers changed in each way."""
        return (
            f"Of {self.better + self.worse + self.same:,} questions that were asked after "
            f"{self.first:,} and after {self.last:,} batches, {self.better:,} were answered better "
            f"in the end, {self.worse:,} worse and {self.same:,} alike. Some of each kind, not "
            "chosen by hand:"
        )


def changes_of(lines: Iterable[SampleLine], metrics: Mapping[str, AnswerMetric]) -> AnswerChanges:
    """Compare the first with the last evaluation that was kept; without two the counts are 0."""
    early: dict[str, SampleLine] = {}
    late: dict[str, SampleLine] = {}
    first = last = -1
    for line in lines:
        if line.kind != "eval" or line.sample != 0:
            continue
        if first < 0 or line.step == first:
            first = line.step
            if len(early) < MAX_QUESTIONS:
                early.setdefault(line.question, line)
        if line.step > last:
            last = line.step
            late = {}
        if line.step == last and line.question in early:
            late.setdefault(line.question, line)
    if last == first:
        return AnswerChanges()
    both = [*early.values(), *late.values()]
    return _compared(AnswerChanges(first, last), early, late, grades_by(metrics, both))


def grades_by(
    metrics: Mapping[str, AnswerMetric], lines: Iterable[SampleLine]
) -> Callable[[SampleLine], float]:
    """Return a function that grades an answer by the metric that all compared answers have."""
    parts: dict[str, list[dict[str, float]]] = {}
    for line in lines:
        parts.setdefault(line.environment, []).append(line.parts)
    used = {
        name: metrics.get(name, AnswerMetric()).in_answers(of_environment)
        for name, of_environment in parts.items()
    }
    return lambda line: used[line.environment].grade(line.reward, line.parts)


def _compared(
    changes: AnswerChanges,
    early: dict[str, SampleLine],
    late: dict[str, SampleLine],
    grade_of: Callable[[SampleLine], float],
) -> AnswerChanges:
    """Count the questions of each kind, and choose the first one or two of each to show."""
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "right": [], "wrong": []}
    for question in sorted(late):
        before, after = grade_of(early[question]), grade_of(late[question])
        if after > before + EPSILON:
            kinds["better"].append(question)
        elif after < before - EPSILON:
            kinds["worse"].append(question)
        else:
            kinds["right" if after >= 1.0 - EPSILON else "wrong"].append(question)
    changes.better, changes.worse = len(kinds["better"]), len(kinds["worse"])
    changes.same = len(kinds["right"]) + len(kinds["wrong"])
    shown = kinds["better"][:2] + kinds["worse"][:1] + kinds["wrong"][:1] + kinds["right"][:1]
    changes.shown = [_change(early[question], late[question], grade_of) for question in shown[:4]]
    return changes


def _change(
    early: SampleLine, late: SampleLine, grade_of: Callable[[SampleLine], float]
) -> AnswerChange:
    note = ", ".join(f"{name}: {text}" for name, text in late.notes.items())
    answers = [
        GreedyAnswer(e.step, grade_of(e), e.reward, cut(e.text), e.tokens, e.finish)
        for e in (early, late)
    ]
    return AnswerChange(late.question, cut(late.prompt), cut(note), *answers)


def cut(text: str) -> str:
    """Leave out the middle of a long text."""
    left_out = len(text) - 2 * END_CHARACTERS
    if left_out <= 40:
        return text
    return f"{text[:END_CHARACTERS]}\n[... {left_out:,} characters ...]\n{text[-END_CHARACTERS:]}"


# --------------------------------------------------------------------------------------------------
# Settings of a run that differ from their defaults, by the path with which they are set.

REQUIRED = object()
"""Stands for the default of a setting that has none."""


def changed_settings(settings: Settings) -> dict[str, tuple[str, str]]:
    """Return path -> value and default, both written as JSON; an absent default is a dash.

    Example:
        {"learner.lr": ("2e-4", "1e-6")}
    """
    return {
        path: (_written(value), "-" if default is REQUIRED else _written(default))
        for path, value, default in _differences(settings, "")
    }


def setting_of(settings: Settings, path: str) -> str:
    """Return the value of one setting, written as JSON; a dash where this run has no such table."""
    value: Any = settings
    for name in path.split("."):
        if not isinstance(value, BaseModel):
            return "-"
        value = getattr(value, name)
    return _written(value)


def _differences(table: BaseModel, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and default of each setting that differs."""
    for name, entry in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from _differences(value, f"{prefix}{name}.")
            continue
        is_required = entry.is_required()
        default = REQUIRED if is_required else entry.get_default(call_default_factory=True)
        if is_required or value != default:
            yield f"{prefix}{name}", value, default


def _written(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON can hold."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return str(value)


# --------------------------------------------------------------------------------------------------
# A run as its report shows it: read once from the files of its folder.


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as the report shows it."""

    name: str
    folder: Path
    state: RunState
    settings: Settings
    changed: Mapping[str, tuple[str, str]]
    """Path of a setting -> value and default, where they differ."""
    curves: Curves
    evaluations: list[EvaluationFigures]
    summary: Mapping[str, object]
    lives: list[ActorIncarnation]
    changes: AnswerChanges
    versions: Mapping[str, str]
    supervised: Curves
    """Supervised training of the model that it began with; empty where that is not known."""

    @property
    def is_rewarded(self) -> bool:
        """Whether its held-out score is of answers, not of rows that supervised training has."""
        return not any(line.result.title == LOG_LIKELIHOOD for line in self.evaluations)


def read_run(path: Path) -> ReportedRun:
    """Read a run, whether it has finished or not.

    Args:
        path: Folder of the run.

    Raises:
        SettingsError: There is no such run, or it has trained no batch yet.
    """
    folder = run_folder_of(path)
    settings = load(folder.config)
    curves = read_curves(folder.metrics, KEYS)
    if not curves.steps:
        raise SettingsError(
            f"{folder.path} must have trained a batch before there is something to report, got "
            f"none; look at it with `nyala status {folder.path}`"
        )
    add_derived(curves)
    spent_s = accumulated(curves.values["durations_s"])
    return ReportedRun(
        name=settings.run.name,
        folder=folder.path,
        state=folder.state,
        settings=settings,
        changed=changed_settings(settings),
        curves=curves,
        evaluations=read_evaluations(
            folder.evaluations, dict(zip(curves.steps, spent_s, strict=True))
        ),
        summary=folder.read_summary() if folder.state is RunState.FINISHED else {},
        lives=actor_lives(folder.path, curves, max_policy_lag=settings.run.max_policy_lag),
        changes=changes_of(read_samples(folder.path), metrics_of(settings.run, settings.rewards)),
        versions=read_versions(folder.path),
        supervised=read_curves(Path(settings.run.model_path) / SUPERVISED_FILE, KEYS),
    )
