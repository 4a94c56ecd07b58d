"""Percentiles and a short histogram of log-ratios from counts in fixed bins.

Counts are integers, so they add up to the same over any cut into microbatches and ranks, in any
order: what is read from them is deterministic, and cost one small sum over ranks.

Bins are equally wide in asinh(x / FINE): near zero as wide as FINE / 20, further out 5 % of x. That
resolves rounding noise of 1e-6 nats, drift of 0.1 and a token that mu never expected alike.

Shapes: N tokens, K bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import ratio_bins

FINE = 1e-4  # nats: where bins go from absolute to relative width
WIDEST = 300.0  # nats: exp of twice as much is still a float64
BINS_PER_UNIT = 20
HALF = math.ceil(math.asinh(WIDEST / FINE) * BINS_PER_UNIT)
NUM_BINS = 2 * HALF + 1


def count(values_N: Tensor) -> Tensor:
    """Count values into bins, the middle one around zero; shape [K], int64."""
    scaled_N = torch.asinh(values_N.double() / FINE) * BINS_PER_UNIT
    bins_N = scaled_N.round().nan_to_num(nan=HALF).clamp(-HALF, HALF).long() + HALF
    counts_K = torch.zeros(NUM_BINS, dtype=torch.int64, device=values_N.device)
    return counts_K.scatter_add_(0, bins_N, torch.ones_like(bins_N))


def percentile(counts_K: Tensor, percent: float) -> float:
    """Return the middle of the bin that holds the value of rank ceil(percent * n / 100).

    Args:
        counts_K: Sum of results of `count`. Shape [K].
        percent: In [0, 100].

    Returns:
        The value in nats; 0 where nothing was counted.
    """
    total = int(counts_K.sum())
    if not total:
        return 0.0
    rank = max(1, math.ceil(percent * total / 100))
    index = int(torch.searchsorted(counts_K.cumsum(0), rank))
    return _middle(index)


def in_few_bins(counts_K: Tensor) -> dict[str, int]:
    """Add up bins to those of `ratio_bins`, each by the value in its middle.

    Args:
        counts_K: Sum of results of `count`. Shape [K].

    Returns:
        Each name of `ratio_bins.NAMES` -> values. One that is within 2.5 % of an edge may be
        counted on its other side.
    """
    few = dict.fromkeys(ratio_bins.NAMES, 0)
    for index, counted in enumerate(counts_K.tolist()):
        if counted:
            few[ratio_bins.name_of(_middle(index))] += counted
    return few


def _middle(index: int) -> float:
    return FINE * math.sinh((index - HALF) / BINS_PER_UNIT)
