"""Keys of `metrics.jsonl`, each with its unit and meaning, for `nyala metrics` and the docs.

Figures that are fields of a class are described there, beneath the field; the others here.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from learner.phase_names import PHASES
from learner.training.critic import CriticFigures
from learner.training.divergence import Divergence
from learner.training.step import BatchOutcome, TrainedBatch

from .metrics import BatchFigures, StepTimes


class Key(NamedTuple):
    """One key of a line."""

    name: str
    unit: str
    meaning: str


LINE = (
    Key("step", "batches", "Number of the batch, from 1."),
    Key("lineage", "1", "Life of the learner that trained it."),
    Key("time", "s", "Unix time of the line."),
    Key("is_replay", "true or false", "Sealed by an earlier life of the learner."),
    Key("environments", "by name", "`episodes`, `groups`, `zero_variance_groups`, `reward_mean`, "
        "and `accuracy` where the reward has a part `exact`."),
    Key("alerts", "names", "Conditions that need attention; the learner's log has their text."),
    Key("advice", "list", "`rule` and `text` of the advice that holds now."),
    Key("actors", "actors", "Actors that were heard of lately, with weights or not."),
    Key("actors_wanted", "actors", "Actors that the run wants: `nyala_actors_wanted`."),
    Key("actors_wanted_why", "text", "What that number follows from."),
    Key("actor_hours", "h", "Time of all actors of the run together."),
    Key("cost", "money", "What that has cost by `fleet.price_per_actor_hour`; null without it."),
    Key("sampling_alarms", "alarms", "Times since the learner's start that nobody sampled."),
    Key("dropped_samples", "episodes", "Sampled texts that were not kept, for lack of room."),
    Key("trained_tokens_per_s", "tokens/s", "Speed of training, without waits."),
    Key("peak_gib", "GiB by phase", "Most GPU memory allocated; null on a CPU."),
    Key("idle_fraction", "0 to 1", "Share of the run's time spent waiting for batches."),
    Key("wall_s", "s", "Time of the run so far, over all lives of the learner."),
    Key("filtered_groups", "groups", "Groups of equal rewards that were replaced by others."),
    Key("dropped_groups", "groups by reason", "Dropped in this life of the learner."),
    Key("dropped_by_length", "episodes by length", "The same by tokens of the completion."),
)  # fmt: skip
"""Keys that no class below has."""
PHASE_MEANINGS = {
    "wait": "Waiting for the batch: the learner is idle.",
    "fetch": "Reading records, on ranks but the first.",
    "pack": "Packing episodes into microbatches.",
    "gather": "Waiting for the weights of the version before to be gathered.",
    "prepare": "Passes without a gradient, before the first optimizer step.",
    "forward": "Forward passes and losses.",
    "backward": "Backward passes.",
    "clip": "Norm and clipping of the gradient.",
    "optimizer": "Optimizer steps.",
    "checkpoint": "What a checkpoint holds up.",
    "other": "All else between two batches.",
}
UNITS = (
    (r"^policy_lag_histogram$", "tokens by lag"),
    (r"^log_ratio_histogram$", "tokens by nats"),
    (r"^episodes_by_", "episodes by name"),
    (r"percentiles$", "1, by percent"),
    (r"^reward_parts$", "reward by part"),
    (r"tflops", "10^12 operations/s"),
    (r"fraction|effective_sample_size|^mfu$", "0 to 1"),
    (r"policy_lag", "batches"),
    (r"tokens|response_length", "tokens"),
    (r"episodes$", "episodes"),
    (r"groups$", "groups"),
    (r"^kl_(pi|mu)_|logprob_diff|^entropy$", "nats"),
    (r"^reward|^advantage|^value_mean", "reward"),
    (r"steps$|^skipped", "optimizer steps"),
    (r"^reuse_count", "times"),
    (r"", "1"),
)
"""Pattern of a field's name -> its unit; the first that fits."""


def keys() -> list[Key]:
    """List all keys of a line, in the order of their names."""
    of_classes = (BatchFigures, Divergence, BatchOutcome, TrainedBatch, CriticFigures, StepTimes)
    nested = {"outcome", "divergence", "critic", "measured"}  # their own fields are keys
    fields = [
        Key(name, _unit_of(name), text)
        for each in of_classes
        for name, text in _described_fields(each)
        if name not in nested
    ]
    phases = [Key(f"{name}_s", "s", PHASE_MEANINGS[name]) for name in PHASES]
    return sorted([*LINE, *fields, *phases])


def _unit_of(name: str) -> str:
    return next(unit for pattern, unit in UNITS if re.search(pattern, name))


def _described_fields(of: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class with the text beneath each; empty where there is none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    yield field.target.id, " ".join(text.split())
                case _:
                    yield field.target.id, ""
