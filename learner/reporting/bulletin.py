"""A bulletin: what the live view shows of a run's batches and evaluations, in bounded size.

The learner puts it into the store with each batch, from where brokers hand it to observers; on the
learner's machine `nyala up` and `nyala top` make the same from the run's files. Loads without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from configs.errors import RecordError
from learner.profiling.phase_names import PHASES

from .curve import Curve

RECENT = 20  # batches: enough to smooth single ones, few enough to follow the run
MAX_BYTES = 64 * 1024  # ten times what a run with two environments has
OF_A_BATCH = (
    "step",
    "time",
    "wall_s",
    "reward_mean",
    "completion_tokens",
    "trained_tokens",
    "policy_lag_mean",
    "policy_lag_max",
    "mfu",
    "dropped_groups",
    "alerts",
    *(f"{name}_s" for name in PHASES),
)
OF_THE_NEWEST = ("advice", "actors_wanted", "actors_wanted_why", "cost")
OF_AN_EVALUATION = ("step", "accuracy", "environments")

Line: TypeAlias = Mapping[str, object]
"""Of `metrics.jsonl` or `eval.jsonl`."""


class Bulletin:
    """The newest batches, the first and the newest evaluation, and curves of all of them."""

    def __init__(self) -> None:
        self._batches: dict[int, dict[str, object]] = {}
        self._ends: list[dict[str, object]] = []
        self.rewards = Curve()
        """Mean sampled reward of each batch."""
        self.accuracies = Curve()
        """Held-out accuracy of each evaluation."""

    @property
    def batches(self) -> list[dict[str, object]]:
        """At most `RECENT` lines, oldest first, without what nobody is shown."""
        return list(self._batches.values())

    @property
    def evaluations(self) -> list[dict[str, object]]:
        """The first and the newest, or the only one."""
        return self._ends if len(self._ends) < 2 else [self._ends[0], self._ends[-1]]

    def add_batch(self, line: Line) -> None:
        """Take a line of `metrics.jsonl`."""
        for earlier in self._batches.values():
            for name in OF_THE_NEWEST:
                earlier.pop(name, None)
        names = (*OF_A_BATCH, *OF_THE_NEWEST)
        self._batches[int(_number(line, "step"))] = {k: line[k] for k in names if k in line}
        if len(self._batches) > RECENT:
            del self._batches[next(iter(self._batches))]
        self.rewards.add(_number(line, "reward_mean"))

    def add_evaluation(self, line: Line) -> None:
        """Take a line of `eval.jsonl`."""
        kept = {name: line[name] for name in OF_AN_EVALUATION if name in line}
        self._ends = [*self._ends[:1], kept]
        self.accuracies.add(_number(line, "accuracy"))

    def forget_batches(self) -> None:
        """Begin anew: a learner that resumes has taken lines back."""
        self._batches.clear()
        self.rewards = Curve()

    def forget_evaluations(self) -> None:
        """Begin anew."""
        self._ends = []
        self.accuracies = Curve()

    def encode(self) -> bytes | None:
        """Write it as JSON; None where it would be too large."""
        text = json.dumps(
            {
                "batches": self.batches,
                "evaluations": self.evaluations,
                "rewards": [round(value, 4) for value in self.rewards.points],
                "accuracies": [round(value, 4) for value in self.accuracies.points],
            },
            default=str,
        ).encode()
        return text if len(text) <= MAX_BYTES else None

    @classmethod
    def decode(cls, text: bytes) -> Bulletin:
        """Read one that was encoded.

        Raises:
            RecordError: It is no bulletin.
        """
        try:
            told = msgspec.json.decode(text, type=_Told)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"a bulletin must be one that this version's learner writes, got: {error}"
            ) from None
        bulletin = cls()
        for batch in told.batches[-RECENT:]:
            bulletin.add_batch(batch)
        for evaluation in told.evaluations[-2:]:
            bulletin.add_evaluation(evaluation)
        bulletin.rewards = Curve(told.rewards)
        bulletin.accuracies = Curve(told.accuracies)
        return bulletin


class _Told(msgspec.Struct):
    batches: list[dict[str, object]]
    evaluations: list[dict[str, object]]
    rewards: list[float]
    accuracies: list[float]


def _number(line: Line, name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
