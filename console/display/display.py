"""The display of `nyala up`: a live bar on a terminal, plain lines elsewhere.

Both show the same `View`, whatever its figures come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from configs.printable import printable, printable_lines
from console.typed import as_typed

from .progress import Progress

PLAIN_EVERY_S = 5.0  # a line for each step would bury a log file


@dataclass(frozen=True, slots=True)
class View:
    """The state of a run at one moment."""

    progress: Progress
    stages: Mapping[str, str]
    """Process -> its stage of starting, until the first batch of this session."""
    actors_alive: int
    is_training: bool = True
    """The first batch of this session is trained."""
    alarm: str | None = None
    """Why nobody samples, for as long as nobody does."""


class Display(Protocol):
    """Shows a run to a person."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, view: View) -> None:
        """Show the state of the run; cheap, called often."""
        ...

    def log(self, text: str) -> None:
        """Print an event, such as a restart; it stays visible."""
        ...


def make_display(console: Console, *, name: str, plain: bool) -> Display:
    """Choose the display that fits where the output goes."""
    if plain or not console.is_terminal:
        return PlainDisplay(console, name=name)
    return LiveDisplay(console, name=name)


class LiveDisplay:
    """A progress bar and the figures of the run, redrawn in place."""

    def __init__(self, console: Console, *, name: str) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._bar = Bar(
            TextColumn(f"[bold]{name}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(name, total=None, eta="")
        self._spinners: dict[str, Spinner] = {}

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, view: View) -> None:
        """Redraw."""
        if not view.is_training:
            self._live.update(Group(self._starting(view), *_alarm_lines(view)))
            return
        eta = view.progress.eta_s
        self._bar.update(
            self._task,
            total=view.progress.steps,
            completed=view.progress.step,
            eta="" if eta is None else f"{duration(eta)} left",
        )
        shown: list[RenderableType] = [self._bar, _figures_table(view)]
        if view.progress.alerts is not None:
            shown.append(Text(printable(f"ALERT {view.progress.alerts}"), style="yellow"))
        self._live.update(Group(*shown, *_alarm_lines(view)))

    def log(self, text: str) -> None:
        """Print above the bar."""
        print_line(self._live.console, f"  {text}")

    def _starting(self, view: View) -> RenderableType:
        rows = []
        for name, stage in view.stages.items():
            spinner = self._spinners.setdefault(name, Spinner("dots"))
            spinner.update(text=Text(printable(f"{name}: {stage}")))
            rows.append(spinner)
        return Group(*rows)


class PlainDisplay:
    """Lines for logs and pipes: each new stage once, then the figures every few seconds."""

    def __init__(
        self, console: Console, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._name = name
        self._clock = clock
        self._told: dict[str, str] = {}
        self._last_step = 0
        self._alerts: str | None = None
        self._has_alarm = False
        self._due = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, view: View) -> None:
        """Print what is new."""
        if (view.alarm is not None) != self._has_alarm:
            self._has_alarm = view.alarm is not None
            text = view.alarm or "has ended: episodes are made again"
            self.log(f"{self._name}: ALARM {text}")
        step = view.progress.step
        if not view.is_training:
            for name, stage in view.stages.items():
                if self._told.get(name) != stage:
                    self._told[name] = stage
                    self.log(f"{name}: {stage}")
            return
        is_last = step == view.progress.steps
        if step == self._last_step or (self._clock() < self._due and not is_last):
            return
        self._last_step, self._due = step, self._clock() + PLAIN_EVERY_S
        values = ", ".join(f"{label} {value}" for label, value in figures(view).items())
        self.log(f"{self._name}: batch {step}/{view.progress.steps}, {values}")
        if view.progress.alerts not in (None, self._alerts):
            self.log(f"{self._name}: ALERT {view.progress.alerts}; the learner's log says why")
        self._alerts = view.progress.alerts

    def log(self, text: str) -> None:
        """Print a line."""
        print_line(self._console, text)


def figures(view: View) -> dict[str, str]:
    """Write the figures of a run for people; a missing one is a dash."""
    progress = view.progress
    return {
        "reward": _number(progress.reward, "{:.3f}"),
        "accuracy": _number(progress.accuracy, "{:.3f}"),
        **{f"of {name}": f"{value:.3f}" for name, value in progress.accuracies.items()},
        "tokens/s": _number(progress.tokens_per_s, "{:,.0f}"),
        "policy lag": _number(progress.policy_lag, "{:.2f}"),
        "learner idle": _number(progress.idle_fraction, "{:.0%}"),
        "actors": str(view.actors_alive),
        "left": "-" if progress.eta_s is None else duration(progress.eta_s),
    }


class IdleTime:
    """Turns the reason why nobody samples into an alarm, once it has lasted."""

    def __init__(self, alarm_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._alarm_s = alarm_s
        self._clock = clock
        self._since: float | None = None
        self._step = 0

    def alarm(self, reason: str | None, step: int) -> str | None:
        """Return the reason if it, with a step that does not change, has lasted long enough."""
        now = self._clock()
        if reason is None or step != self._step or self._since is None:
            self._since = None if reason is None else now
            self._step = step
            return None
        return reason if now - self._since >= self._alarm_s else None


def print_line(console: Console, text: str) -> None:
    """Print text that may come from another machine: never markup, nor a terminal's commands."""
    console.print(printable_lines(as_typed(text)), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Write a time span: `42 s`, `3:05 min`, `2:10 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _figures_table(view: View) -> Table:
    values = figures(view)
    del values["left"]  # stands beside the bar
    table = Table(box=None, padding=(0, 3, 0, 0))
    for label in values:
        table.add_column(label, header_style="dim")
    table.add_row(*values.values())
    return table


def _alarm_lines(view: View) -> list[RenderableType]:
    return [] if view.alarm is None else [Text(printable(f"ALARM {view.alarm}"), style="bold red")]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
