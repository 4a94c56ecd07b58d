"""Contents of a report: figures, settings and versions of runs, and charts with their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from console.display.snapshot import duration
from console.run.run_folder import RunFolder, RunState
from learner.reporting.figures import (
    GRAD_NORM,
    LEARNING,
    LEARNING_RATE,
    OFF_POLICY,
    SPEED,
    SUPERVISED,
    Plot,
)

from .curve_charts import curve_charts, reward_chart, score_chart
from .curves import judged_by, lines_of
from .drawing import Chart, buckets, mean, short
from .record import ReportedRun, setting_of
from .run_charts import actor_chart, lag_chart, phase_chart, ratio_chart, ratio_histogram

# --------------------------------------------------------------------------------------------------
# A run in a sentence and in a dozen figures.


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure and its label."""

    label: str
    value: str
    note: str = ""


def headline(run: ReportedRun) -> str:
    """Write how far a run is and how its score has changed."""
    step, steps = run.curves.steps[-1], run.settings.run.steps
    folder = RunFolder(run.folder)
    state = "finished" if run.state is RunState.FINISHED else "not finished"
    state = "stopped" if folder.is_stopped else state
    text = f"{state} after {step:,} of {steps:,} batches"
    if folder.is_stopped:
        text += f"; `nyala up {run.folder}` goes on"
    if len(run.evaluations) > 1:
        first, last = run.evaluations[0], run.evaluations[-1]
        text += f"; held-out {last.result.title} from {first.score:.3f} to {last.score:.3f}"
        if (first.result.reward, last.result.reward) != (None, None):
            rewards = f"{first.result.trained:.3f} to {last.result.trained:.3f}"
            text += f", held-out reward from {rewards}"
    return f"{text[0].upper()}{text[1:]}. Model: {run.settings.run.model}."


def tiles(run: ReportedRun) -> list[Tile]:
    """Choose the figures that say most about a run; a dash where there is none."""
    curves, values = run.curves, run.curves.values
    spent_s = _sum(values["durations_s"])
    waited_s = _sum(values["wait_s"][1:])  # the wait for the first batch is start-up
    tokens = _sum(values["completion_tokens"]) - _sum(values["reused_tokens"])
    evaluations = run.evaluations
    best = max(evaluations, key=lambda e: e.score, default=None)
    title = judged_by([evaluations])
    lags = sum(curves.lags.values())
    lag = sum(lag * count for lag, count in curves.lags.items()) / lags if lags else math.nan
    return [
        Tile(
            f"held-out {title}",
            f"{evaluations[-1].score:.3f}" if evaluations else "-",
            f"from {evaluations[0].score:.3f}" if len(evaluations) > 1 else "",
        ),
        Tile(
            f"best {title}",
            f"{best.score:.3f}" if best else "-",
            f"after {best.step:,} batches" if best else "",
        ),
        Tile("batches", f"{curves.steps[-1]:,}", f"of {run.settings.run.steps:,}"),
        Tile("time of training", duration(spent_s), "first batch to last"),
        Tile("tokens", short(tokens), f"{tokens / spent_s:,.0f} a second" if spent_s else ""),
        Tile("learner idle", f"{waited_s / spent_s:.0%}" if spent_s else "-", "of that time"),
        Tile("policy lag", short(round(lag, 2)), f"at most {max(curves.lags, default=0)}"),
        Tile("actors", f"{len(run.lives):,}", _deaths_in_words(run)),
    ]


def _deaths_in_words(run: ReportedRun) -> str:
    died = sum(life.end == "died" for life in run.lives)
    return f"{died:,} of them died" if died else "none of them died"


def _sum(values: Sequence[float]) -> float:
    return math.fsum(value for value in values if math.isfinite(value))


# --------------------------------------------------------------------------------------------------
# Rows with a text for each run: figures, settings, versions.


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The values of one setting, figure or version in all runs."""

    label: str
    cells: Sequence[str]
    default: str = ""

    @property
    def differs(self) -> bool:
        """Whether the values of the runs differ."""
        return len(set(self.cells)) > 1


def figure_rows(runs: Sequence[ReportedRun]) -> list[ReportRow]:
    """Put the figures of the runs side by side."""
    return [
        ReportRow(_label(same), [f"{t.value} ({t.note})" if t.note else t.value for t in same])
        for same in zip(*(tiles(run) for run in runs), strict=True)
    ]


def _label(same: Sequence[Tile]) -> str:
    """Name a figure of several runs, whose held-out answers may be judged by different parts."""
    return " or ".join(dict.fromkeys(tile.label for tile in same))


def setting_rows(runs: Sequence[ReportedRun]) -> list[ReportRow]:
    """List the settings that any run has changed."""
    defaults = {path: default for run in runs for path, (_, default) in run.changed.items()}
    return [
        ReportRow(path, [setting_of(run.settings, path) for run in runs], default)
        for path, default in defaults.items()
    ]


def version_rows(runs: Sequence[ReportedRun]) -> list[ReportRow]:
    """List versions of packages, where they were written down."""
    names = dict.fromkeys(name for run in runs for name in run.versions)
    return [ReportRow(name, [_known(run.versions, name) for run in runs]) for name in names]


def _known(versions: Mapping[str, str], name: str) -> str:
    return versions.get(name, "-")


# --------------------------------------------------------------------------------------------------
# Sections of a report: charts under a heading, with their numbers as tables.


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of numbers; None = there is none."""

    label: str
    cells: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class CurveTable:
    """The numbers of a section's curves, of one run."""

    title: str
    columns: Sequence[str]
    rows: Sequence[TableRow]


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: Sequence[Chart]
    tables: Sequence[CurveTable]


def sections_of(runs: Sequence[ReportedRun]) -> list[Section]:
    """Draw all charts, those with a line for each run first."""
    judged = [run for run in runs if run.is_rewarded] or runs  # the two scores have no common axis
    drawn = [score_chart(judged), score_chart(judged, over_time=True), reward_chart(judged)]
    charts = [chart for chart in drawn if chart is not None]
    starts = [replace(run, curves=run.supervised) for run in runs if run.supervised.steps]
    sections = [
        _section("Supervised training", runs, (SUPERVISED,)),
        _section("Learning", runs, LEARNING, before=charts),
        _section("Off-policy", runs, OFF_POLICY, after=(ratio_chart, ratio_histogram, lag_chart)),
        _section("Speed and actors", runs, SPEED, after=(phase_chart, actor_chart)),
        _section("Supervised start", starts, (SUPERVISED, GRAD_NORM, LEARNING_RATE)),
    ]
    return [section for section in sections if section.charts]


def _section(
    title: str,
    runs: Sequence[ReportedRun],
    plots: Sequence[Plot],
    *,
    before: Sequence[Chart] = (),
    after: Sequence[Callable[[ReportedRun], Chart | None]] = (),
) -> Section:
    charts = [*before, *curve_charts(plots, runs)]
    for draw in after:
        charts += [_titled(chart, run, runs) for run in runs if (chart := draw(run)) is not None]
    tables = [_table(run, plots, is_alone=len(runs) == 1) for run in runs]
    return Section(title, charts, tables)


def _titled(chart: Chart, run: ReportedRun, runs: Sequence[ReportedRun]) -> Chart:
    return chart if len(runs) == 1 else replace(chart, title=f"{chart.title}: {run.name}")


def _table(run: ReportedRun, plots: Sequence[Plot], *, is_alone: bool) -> CurveTable:
    """List the numbers of the curves, a row for each of their points."""
    steps, values = run.curves.steps, run.curves.values
    columns = [
        (f"{plot.title}: {line.label}" if len(lines_of(plot)) > 1 else plot.title, key)
        for plot in plots
        for key, line in lines_of(plot).items()
        if any(map(math.isfinite, values[key]))
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
    return CurveTable(title, ["batch", *(name for name, _ in columns)], rows)
