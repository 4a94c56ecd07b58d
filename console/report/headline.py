"""A run in a sentence and in a dozen figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from console.display.figures import duration
from console.report.charts.drawing import short
from console.report.record.runs import Run
from console.run.run_folder import RunState


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure."""

    label: str
    value: str
    note: str = ""


def headline(run: Run) -> str:
    """Write how far a run is and what it has learnt."""
    step, steps = run.curves.steps[-1], run.settings.run.steps
    state = "finished" if run.state is RunState.FINISHED else "not finished"
    text = f"{state} after {step:,} of {steps:,} batches"
    if len(run.evaluations) > 1:
        first, last = run.evaluations[0], run.evaluations[-1]
        text += f"; held-out accuracy from {first.accuracy:.3f} to {last.accuracy:.3f}"
    return f"{text[0].upper()}{text[1:]}. Model: {run.settings.run.model}."


def tiles(run: Run) -> list[Tile]:
    """Choose the figures that say most about a run; a dash where there is none."""
    curves, values = run.curves, run.curves.values
    spent_s = _sum(values["durations_s"])
    waited_s = _sum(values["wait_s"][1:])  # the wait for the first batch is start-up
    tokens = _sum(values["completion_tokens"]) - _sum(values["reused_tokens"])
    evaluations = run.evaluations
    best = max(evaluations, key=lambda e: e.accuracy, default=None)
    lags = sum(curves.lags.values())
    lag = sum(lag * count for lag, count in curves.lags.items()) / lags if lags else math.nan
    return [
        Tile(
            "held-out accuracy",
            f"{evaluations[-1].accuracy:.3f}" if evaluations else "-",
            f"from {evaluations[0].accuracy:.3f}" if len(evaluations) > 1 else "",
        ),
        Tile(
            "best accuracy",
            f"{best.accuracy:.3f}" if best else "-",
            f"after {best.step:,} batches" if best else "",
        ),
        Tile("batches", f"{curves.steps[-1]:,}", f"of {run.settings.run.steps:,}"),
        Tile("time of training", duration(spent_s), "first batch to last"),
        Tile("tokens", short(tokens), f"{tokens / spent_s:,.0f} a second" if spent_s else ""),
        Tile("learner idle", f"{waited_s / spent_s:.0%}" if spent_s else "-", "of that time"),
        Tile("policy lag", short(round(lag, 2)), f"at most {max(curves.lags, default=0)}"),
        Tile("actors", f"{len(run.lives):,}", _ends(run)),
    ]


def _ends(run: Run) -> str:
    died = sum(life.end == "died" for life in run.lives)
    return f"{died:,} of them died" if died else "none of them died"


def _sum(values: Sequence[float]) -> float:
    return math.fsum(value for value in values if math.isfinite(value))
