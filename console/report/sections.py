"""Sections of a report: charts under a heading, with their numbers as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from console.report.charts.actor_chart import actor_chart
from console.report.charts.curve_charts import accuracy_chart, curve_charts
from console.report.charts.drawing import Chart
from console.report.charts.run_charts import lag_chart, phase_chart, ratio_chart, ratio_histogram
from console.report.charts.thinning import buckets, mean
from console.report.record.figures import LEARNING, OFF_POLICY, SPEED, Figure
from console.report.record.runs import Run


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of numbers; None = there is none."""

    label: str
    cells: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a section's curves, of one run."""

    title: str
    columns: Sequence[str]
    rows: Sequence[TableRow]


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: Sequence[Chart]
    tables: Sequence[Table]


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """Draw all charts, those with a line for each run first."""
    accuracies = [accuracy_chart(runs, over_time=over_time) for over_time in (False, True)]
    known = [chart for chart in accuracies if chart is not None]
    sections = [
        _section("Learning", runs, LEARNING, before=known),
        _section("Off-policy", runs, OFF_POLICY, after=(ratio_chart, ratio_histogram, lag_chart)),
        _section("Speed and actors", runs, SPEED, after=(phase_chart, actor_chart)),
    ]
    return [section for section in sections if section.charts]


def _section(
    title: str,
    runs: Sequence[Run],
    figures: Sequence[Figure],
    *,
    before: Sequence[Chart] = (),
    after: Sequence[Callable[[Run], Chart | None]] = (),
) -> Section:
    charts = [*before, *curve_charts(figures, runs)]
    for draw in after:
        charts += [_named(chart, run, runs) for run in runs if (chart := draw(run)) is not None]
    tables = [_table(run, figures, is_alone=len(runs) == 1) for run in runs]
    return Section(title, charts, tables)


def _named(chart: Chart, run: Run, runs: Sequence[Run]) -> Chart:
    return chart if len(runs) == 1 else replace(chart, title=f"{chart.title}: {run.name}")


def _table(run: Run, figures: Sequence[Figure], *, is_alone: bool) -> Table:
    """List the numbers of the curves, a row for each of their points."""
    steps, values = run.curves.steps, run.curves.values
    columns = [
        (f"{figure.title}: {line.label}" if len(figure.lines) > 1 else figure.title, line.key)
        for figure in figures
        for line in figure.lines
    ]
    rows: list[TableRow] = []
    for bucket in buckets(len(steps)):
        first, last = steps[bucket.start], steps[bucket.stop - 1]
        means = [mean(values[key], bucket) for _, key in columns]
        rows.append(
            TableRow(
                str(first) if first == last else f"{first}-{last}",
                [value if math.isfinite(value) else None for value in means],
            )
        )
    title = "Numbers of these curves" if is_alone else f"Numbers of these curves: {run.name}"
    return Table(title, ["batch", *(name for name, _ in columns)], rows)
