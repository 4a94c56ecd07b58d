"""Progress of a run, from the files that the learner writes: pure arithmetic on their lines.

A learner that resumes from a checkpoint replaces the files by shorter ones, which are then read
from their beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from console.run.run_folder import RunFolder

from .json_lines import JsonLines, Row, number

RECENT_STEPS = 20  # enough to smooth single batches, few enough to follow the run


@dataclass(frozen=True, slots=True)
class Progress:
    """Figures of a run at one moment; None = not available yet."""

    step: int
    steps: int
    reward: float | None = None
    """Mean sampled reward of the last batches."""
    accuracy: float | None = None
    """Newest held-out accuracy, greedy."""
    accuracy_before: float | None = None
    """Held-out accuracy of the model that the run began with."""
    accuracies: dict[str, float] = field(default_factory=dict)
    """Newest held-out accuracy of each environment, where there are several."""
    tokens_per_s: float | None = None
    """Generated tokens that reached the learner, over the last batches."""
    policy_lag: float | None = None
    """Mean lag of the newest batch, batches."""
    idle_fraction: float | None = None
    """Share of the last batches' time in which the learner waited for episodes."""
    eta_s: float | None = None
    alerts: str | None = None
    """Newest findings of the guards among the last batches, such as `ess, kl at batch 57`."""


class RunProgress:
    """Follows `metrics.jsonl` and `eval.jsonl` of a run folder."""

    def __init__(self, folder: RunFolder, *, steps: int) -> None:
        self._metrics = JsonLines(folder.metrics)
        self._evaluations = JsonLines(folder.evaluations)
        self._steps = steps
        self._rows: dict[int, Row] = {}
        self._accuracy: dict[int, float] = {}
        self._evaluation: Row = {}

    def look(self) -> Progress:
        """Read what is new and sum up."""
        lives = self._metrics.num_files, self._evaluations.num_files
        rows, evaluations = self._metrics.read_new(), self._evaluations.read_new()
        if self._metrics.num_files != lives[0]:
            self._rows.clear()
        if self._evaluations.num_files != lives[1]:
            self._accuracy.clear()
            self._evaluation = {}
        self._rows |= {int(number(row, "step")): row for row in rows}
        for step in list(self._rows)[:-RECENT_STEPS]:
            del self._rows[step]  # a long run has millions
        self._accuracy |= {int(number(row, "step")): number(row, "accuracy") for row in evaluations}
        self._evaluation = evaluations[-1] if evaluations else self._evaluation
        progress = summarise(list(self._rows.values()), self._accuracy, steps=self._steps)
        return replace(progress, accuracies=accuracies(self._evaluation))


def summarise(rows: list[Row], accuracy: dict[int, float], *, steps: int) -> Progress:
    """Sum up the metrics of a run, oldest row first.

    Args:
        rows: Lines of `metrics.jsonl`, one for each step; the newest `RECENT_STEPS` are looked at.
        accuracy: Step -> held-out accuracy.
        steps: Batches of the whole run.
    """
    before = accuracy[min(accuracy)] if accuracy else None
    newest = accuracy[max(accuracy)] if accuracy else None
    if not rows:
        return Progress(0, steps, accuracy=newest, accuracy_before=before)
    recent = rows[-RECENT_STEPS:]
    step = int(number(rows[-1], "step"))
    wall_s = sum(_durations(recent))
    known = wall_s > 0
    timed = recent[-len(_durations(recent)) :]
    return Progress(
        step=step,
        steps=steps,
        reward=sum(number(row, "reward_mean") for row in recent) / len(recent),
        accuracy=newest,
        accuracy_before=before,
        tokens_per_s=sum(number(row, "generated_tokens", "completion_tokens") for row in timed)
        / wall_s
        if known
        else None,
        policy_lag=number(rows[-1], "policy_lag_mean"),
        idle_fraction=min(1.0, sum(number(row, "idle_s", "wait_s") for row in timed) / wall_s)
        if known
        else None,
        eta_s=(steps - step) * wall_s / len(timed) if known else None,
        alerts=_newest_alerts(recent),
    )


def accuracies(evaluation: Row) -> dict[str, float]:
    """Read the accuracy of each environment from a line of `eval.jsonl`; none if there is one."""
    environments = evaluation.get("environments")
    if not isinstance(environments, dict) or len(environments) < 2:
        return {}
    found = {name: each.get("accuracy") for name, each in environments.items()}
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def _newest_alerts(rows: list[Row]) -> str | None:
    for row in reversed(rows):
        names = row.get("alerts")
        if isinstance(names, list) and names:
            return f"{', '.join(map(str, names))} at batch {number(row, 'step'):.0f}"
    return None


def _durations(rows: list[Row]) -> list[float]:
    """Seconds between neighbouring steps; a restart sets `wall_s` back and is left out."""
    walls = [number(row, "wall_s") for row in rows]
    return [max(0.0, after - before) for before, after in pairwise(walls)]
