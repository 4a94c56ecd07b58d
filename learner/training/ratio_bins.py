"""The few bins in which `metrics.jsonl` counts log-ratios: names and edges; loads without torch.

A bin is named by its edge nearer to 0, in nats: `0.03` holds 0.03 to 0.1, `-0.03` holds -0.1 to
-0.03, `3` all above 3, and `0` what is within 0.001 of 0, which is rounding.
"""

from __future__ import annotations

from bisect import bisect_right

_SIZES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # a usual clip bound, 1.2, is at 0.18
EDGES = (*(-size for size in reversed(_SIZES)), *_SIZES)
"""Bounds between the bins, ascending, nats."""
NAMES = tuple(f"{value:g}" for value in (*EDGES[: len(_SIZES)], 0.0, *_SIZES))
"""Names of the bins, in the order of their values: bin i ends at edge i."""


def name_of(log_ratio: float) -> str:
    """Name the bin of a log-ratio.

    Args:
        log_ratio: Log-ratio in nats.

    Example:
        >>> [name_of(x) for x in (0.0, 0.05, -0.05, 40.0)]
        ['0', '0.03', '-0.03', '3']
    """
    return NAMES[bisect_right(EDGES, log_ratio)]
