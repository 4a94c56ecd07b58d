"""Summary of the arms: means and spread, ratios, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

NAIVE = "naive"
"""The reference; every other method corrects."""

Curve = tuple[float, ...]
"""Accuracies of one arm over its run, at equal distances."""
Figures = dict[str, dict[str, dict[str, Any]]]
"""Method -> lag -> what its seeds came to."""


@dataclass(frozen=True, slots=True)
class Point:
    """One arm: a method at a lag, with one seed."""

    lag: int
    method: str
    seed: int


def summarise(curves: Mapping[Point, Curve]) -> Figures:
    """Bring the seeds of each method and lag together."""
    arms: Figures = {}
    for point in curves:
        at_lag = arms.setdefault(point.method, {})
        if str(point.lag) not in at_lag:
            alike = [p for p in curves if (p.method, p.lag) == (point.method, point.lag)]
            at_lag[str(point.lag)] = _figures([curves[p] for p in alike])
    return arms


def area(accuracies: Curve) -> float:
    """Area under the curve over the whole run, by trapezia: 1 is the best."""
    pairs = list(pairwise(accuracies))
    return sum((a + b) / 2 for a, b in pairs) / len(pairs)


def ratios(arms: Figures) -> dict[str, float | str | None]:
    """Divide mean final accuracies; `best` is the correction with the largest mean of them."""
    corrected = [name for name in arms if name != NAIVE]
    if not corrected:
        return {}
    best = max(corrected, key=lambda m: statistics.fmean(at["final"] for at in arms[m].values()))

    def over(above: tuple[str, int], below: tuple[str, int]) -> float | None:
        top, bottom = (arms.get(m, {}).get(str(lag), {}).get("final") for m, lag in (above, below))
        return round(top / bottom, 3) if top is not None and bottom else None

    return {
        "best": best,
        **{f"corrected_over_naive_lag{lag}": over((best, lag), (NAIVE, lag)) for lag in (16, 256)},
        **{f"lag{lag}_over_lag0": over((best, lag), (best, 0)) for lag in (16, 256)},
        **{f"naive_lag{lag}_over_lag0": over((NAIVE, lag), (NAIVE, 0)) for lag in (16, 256)},
    }


def table(arms: Figures) -> str:
    """Show final accuracy and area as a table in Markdown: mean, and deviation of several seeds."""
    lags = sorted({int(lag) for at_lag in arms.values() for lag in at_lag})
    lines = ["| |" + "".join(f" lag {lag} |" for lag in lags), "| --- |" + " --- |" * len(lags)]
    for method, at_lag in arms.items():
        cells = [_cell(at_lag.get(str(lag))) for lag in lags]
        lines.append(f"| {method} |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(lines)


def _figures(curves: Sequence[Curve]) -> dict[str, Any]:
    finals = [round(curve[-1], 4) for curve in curves]
    areas = [round(area(curve), 4) for curve in curves]
    means = [round(statistics.fmean(values), 4) for values in zip(*curves, strict=True)]
    return {
        "final": round(statistics.fmean(finals), 4),
        "final_of_seeds": finals,
        "area": round(statistics.fmean(areas), 4),
        "area_of_seeds": areas,
        "curve": means,
    }


def _cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    final, of_seeds = figures["final"], figures["final_of_seeds"]
    spread = f" ± {statistics.stdev(of_seeds):.2f}" if len(of_seeds) > 1 else ""
    return f"{final:.2f}{spread} ({figures['area']:.2f})"
