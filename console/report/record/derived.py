"""Figures that follow from others of the same batch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

from .curves import NAN, Curves


def add_derived(curves: Curves) -> None:
    """Add `tokens_per_s`, `zero_variance_fraction` and `durations_s` to the figures of a run."""
    values = curves.values
    seconds = durations(values["wall_s"])
    tokens = [
        made - (0.0 if math.isnan(again) else again)
        for made, again in zip(values["completion_tokens"], values["reused_tokens"], strict=True)
    ]
    values["durations_s"] = seconds
    values["tokens_per_s"] = _ratios(tokens, seconds)
    values["zero_variance_fraction"] = _ratios(values["zero_variance_groups"], values["groups"])


def accumulated(values: Sequence[float]) -> list[float]:
    """Add up what all batches so far have."""
    return list(accumulate(0.0 if math.isnan(each) else each for each in values))


def durations(walls: Sequence[float]) -> array[float]:
    """Seconds between neighbouring batches; a restart sets `wall_s` back, and has none."""
    gaps = [NAN, *(after - before for before, after in pairwise(walls))]
    return array("d", (gap if gap > 0 else NAN for gap in gaps[: len(walls)]))


def _ratios(upper: Sequence[float], lower: Sequence[float]) -> array[float]:
    return array("d", (a / b if b else NAN for a, b in zip(upper, lower, strict=True)))
