"""The display of a run (live view or plain lines), and lines that are safe on a terminal.

Both displays show the same `View`, whatever its figures come from. `nyala up` and `nyala top` use
them; verbs print foreign text with `print_line`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from rich.console import Console
from rich.text import Text

from configs.errors import printable_lines
from console.command_line import as_typed

from .live_view import live_view
from .snapshot import View, figures, until_the_batch, wanted_actors

# --------------------------------------------------------------------------------------------------
# Lines at the bottom of a terminal that are redrawn in place: without flicker, without scrolling.
#
# Only lines that differ are written, over the old ones, so that nothing is ever blank in between.
# Above them stays what was there before, and what `print` adds. After a change of the terminal's
# size the screen is cleared, because nobody knows how it has broken the old lines.

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CLEAR_SCREEN = "\x1b[H\x1b[J"
CLEAR_BELOW, CLEAR_LINE_END = "\x1b[J", "\x1b[K"
KEPT_PRINTS = 20  # after a change of size


class Screen:
    """The lines that a program redraws on a terminal.

    Example:
        with screen:
            screen.draw(lines)
            screen.print(lambda: console.print("an event"))
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn: list[str] = []
        self._size = console.size
        self._prints: deque[Callable[[], None]] = deque(maxlen=KEPT_PRINTS)

    def __enter__(self) -> Screen:
        self._write(HIDE_CURSOR)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(SHOW_CURSOR)

    def draw(self, lines: Sequence[Text]) -> None:
        """Replace the lines; all that is drawn must fit the terminal."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._write(CLEAR_SCREEN)
            self._drawn = []
            for draw_line in self._prints:
                draw_line()
        new = [self._encoded(line) for line in lines]
        if new == self._drawn:
            return
        out = f"\r\x1b[{len(self._drawn)}A" if self._drawn else "\r"
        for at, line in enumerate(new):
            is_same = at < len(self._drawn) and self._drawn[at] == line
            out += "\n" if is_same else f"{line}{CLEAR_LINE_END}\n"
        self._write(out + CLEAR_BELOW)
        self._drawn = new

    def print(self, output: Callable[[], None]) -> None:
        """Print above the lines, which are drawn again by the next `draw`.

        Args:
            output: Prints; it is called again after the terminal's size has changed.
        """
        if self._drawn:
            self._write(f"\r\x1b[{len(self._drawn)}A{CLEAR_BELOW}")
            self._drawn = []
        self._prints.append(output)
        output()

    def _encoded(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="crop", highlight=False)
        return captured.get()

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


# --------------------------------------------------------------------------------------------------
# The display of a run: the live view on a terminal, plain lines elsewhere.

PLAIN_EVERY_S = 5.0  # a line for each step would bury a log file
SAMPLED_EVERY_S = 15.0  # until the first batch, which takes seconds or minutes
DRAW_EVERY_S = 1.0  # the eye reads no faster, and each drawing costs milliseconds


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
    """Return the live view for a terminal; lines for anything else, or if they are asked for."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(console, name=name)
    return LiveDisplay(console, name=name)


class LiveDisplay:
    """The live view of a run, redrawn in place."""

    def __init__(
        self, console: Console, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._screen = Screen(console)
        self._name = name
        self._clock = clock
        self._view: View | None = None
        self._due = clock()

    def __enter__(self) -> Self:
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        self._screen.__exit__()

    def show(self, view: View) -> None:
        """Redraw, at most once a second but for the moment when training begins."""
        is_new = self._view is None or self._view.is_training != view.is_training
        self._view = view
        if is_new or self._clock() >= self._due:
            self._draw()

    def log(self, text: str) -> None:
        """Print a line above the view."""
        self._screen.print(lambda: print_line(self._console, f"  {text}"))
        self._draw()

    def _draw(self) -> None:
        if self._view is None:
            return
        self._due = self._clock() + DRAW_EVERY_S
        width, height = self._console.size
        ascii_only = self._console.options.ascii_only
        # The cursor stands on the line below.
        lines = live_view(
            self._view, name=self._name, width=width, height=height - 1, ascii_only=ascii_only
        )
        self._screen.draw(lines)


class PlainDisplay:
    """Lines for logs and pipes: each new stage once, then the figures every few seconds."""

    def __init__(
        self, console: Console, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._name = name
        self._clock = clock
        self._told: dict[str, str] = {}
        self._last_step, self._sampled = 0, ""
        self._sampled_due = clock()
        self._alerts: str | None = None
        self._wanted: int | None = None
        self._advised: set[str] = set()
        self._has_alarm = False
        self._closed: set[str] = set()
        self._due = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, view: View) -> None:
        """Print what has changed since the last view."""
        if (view.alarm is not None) != self._has_alarm:
            self._has_alarm = view.alarm is not None
            text = view.alarm or "has ended: there are new episodes"
            self.log(f"{self._name}: ALARM {text}")
        closed = {re.sub(r"\d+", "", text): text for text in view.closed}  # but for its figures
        for closure in closed.keys() - self._closed:
            self.log(f"{self._name}: CLOSED {closed[closure]}")
        self._closed = set(closed)
        step = view.progress.step
        if not view.is_training:
            self._show_start(view)
            return
        is_last = step == view.progress.steps
        if step == self._last_step or (self._clock() < self._due and not is_last):
            return
        self._last_step, self._due = step, self._clock() + PLAIN_EVERY_S
        values = ", ".join(f"{label} {value}" for label, value in figures(view).items())
        self.log(f"{self._name}: batch {step}/{view.progress.steps}, {values}")
        wanted = view.progress.actors_wanted
        if wanted_actors(view) != str(view.actors_alive) and wanted != self._wanted:
            self.log(f"{self._name}: {wanted} actors wanted: {view.progress.actors_wanted_why}")
        self._wanted = wanted
        if view.progress.alerts not in (None, self._alerts):
            self.log(f"{self._name}: ALERT {view.progress.alerts}; the learner's log says why")
        self._alerts = view.progress.alerts
        for rule, text in view.progress.advice.items():
            if rule not in self._advised:
                self.log(f"{self._name}: ADVICE {text}")
        self._advised = set(view.progress.advice)

    def _show_start(self, view: View) -> None:
        """Print new stages, and now and then what is sampled for the first batch."""
        for name, stage in view.stages.items():
            if self._told.get(name) != stage:
                self._told[name] = stage
                self.log(f"{name}: {stage}")
        sampled = ", ".join(until_the_batch(view))
        if sampled not in {"", self._sampled} and self._clock() >= self._sampled_due:
            self._sampled, self._sampled_due = sampled, self._clock() + SAMPLED_EVERY_S
            self.log(f"{self._name}: batch {view.progress.step + 1}, {sampled}")

    def log(self, text: str) -> None:
        """Print an event on a line of its own."""
        print_line(self._console, text)


class IdleTime:
    """Turns the reason why no actor samples into an alarm, once it has lasted."""

    def __init__(self, alarm_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._alarm_s = alarm_s
        self._clock = clock
        self._since: float | None = None
        self._step = 0

    def alarm(self, reason: str | None, step: int) -> str | None:
        """Return the reason once there has been one, at the same step, for `alarm_s` seconds.

        Args:
            reason: Why no actor samples now; None = one does.
            step: Batches trained so far.

        Returns:
            The newest reason; None before that time, and while an actor samples.
        """
        now = self._clock()
        if reason is None or step != self._step or self._since is None:
            self._since = None if reason is None else now
            self._step = step
            return None
        return reason if now - self._since >= self._alarm_s else None


def print_line(console: Console, text: str) -> None:
    """Print text that may come from another machine: never markup, nor a terminal's commands."""
    console.print(printable_lines(as_typed(text)), markup=False, highlight=False, soft_wrap=True)
