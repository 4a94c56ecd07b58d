"""The live view of a run: a snapshot as lines for a terminal of any width and height.

Pure. Parts of a line come in the order of their weight, and the last ones are left out where they
do not fit, so that no figure is ever cut. What comes from other machines is written out. Colours
only repeat what the words say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from configs.printable import printable
from console.display.figures import duration, number_or_dash
from console.display.snapshot import Fill, View
from learner.reporting.curve import sparkline

from .actor_rows import actor_lines
from .lines import bar, beside, cut, ends, fitting, folded, wrapped

LABEL = 10  # columns of the names at the left
LEFT, GAP = 64, 4  # where actors and text stand beside the curves
TWO_COLUMNS = LEFT + GAP + 60
CURVE = 60  # more points than that tell nothing more
FILL = 8  # of the bar of the buffer
NOTE_LINES = 3  # of an alert
REMEDY_LINES = 6  # what to do about it stands at the end
ACTORS_AT_LEAST = 3
LEAST_SHARE = 0.005  # less is 0 %


def live_view(
    view: View, *, name: str, width: int, height: int, ascii_only: bool = False
) -> list[Text]:
    """Write a run as at most `height` lines of at most `width` columns.

    Args:
        view: Of the run.
        name: Of the run.
        width: Columns of the terminal.
        height: Its lines.
        ascii_only: The terminal has no block characters.
    """
    page = _Page(view, name, ascii_only=ascii_only)
    head, notes = [page.header(width)], page.notes(width, max(NOTE_LINES, height // 2))
    if not view.is_training:
        lines = [*head, *page.stages(width), *notes]
    elif width < TWO_COLUMNS:
        body = [*page.figures(width), *notes]
        rest = height - len(head) - len(body)
        sample = page.sample(width)
        sample = sample if rest >= len(sample) + ACTORS_AT_LEAST else []
        lines = [*head, *body, *page.actors(width, rest - len(sample)), *sample]
    else:
        right = width - LEFT - GAP
        rest = height - len(head) - len(notes)
        sample = page.sample(right)
        who = [*page.actors(right, rest - len(sample)), *sample]
        lines = [*head, *beside(page.figures(LEFT), who, at=LEFT + GAP), *notes]
    shown = lines[: max(1, height)]
    for line in shown:
        line.truncate(width, overflow="ellipsis")  # nothing, from 60 columns on
    return shown


class _Page:
    """The parts of the view."""

    def __init__(self, view: View, name: str, *, ascii_only: bool) -> None:
        self._view = view
        self._name = printable(name)
        self._ascii = ascii_only

    def header(self, width: int) -> Text:
        """How far the run is, with a bar in the room that is left."""
        view, progress = self._view, self._view.progress
        done = f"batch {progress.step:,} of {progress.steps:,}"
        if view.is_training:
            left = "" if progress.eta_s is None else f"{duration(progress.eta_s)} left"
        else:
            left = "" if view.elapsed_s is None else f"starting, {duration(view.elapsed_s)}"
        share = progress.step / progress.steps if progress.steps else 0.0
        after = "  ".join(filter(None, [f"{share:.0%}", left]))
        name = cut(self._name, max(8, width - len(done) - len(after) - 6))
        room = width - cell_len(name) - len(done) - len(after) - 6
        line = Text(name, style="bold")
        line.append(f"  {done}  ", style="not bold")
        line.append_text(bar(share, room, ascii_only=self._ascii))
        line.append(f"  {after}" if room > 0 else after, style="not bold")
        return line

    def stages(self, width: int) -> list[Text]:
        """What each process is doing until the first batch."""
        names = max((cell_len(name) for name in self._view.stages), default=0)
        column = min(max(LABEL, names + 2), width // 2)
        return [
            _labelled(name, [stage], width, column=column)
            for name, stage in self._view.stages.items()
        ]

    def figures(self, width: int) -> list[Text]:
        """Curves, speeds, the learner's time and the buffer."""
        progress, room = self._view.progress, width - LABEL
        made, trained = progress.tokens_per_s, progress.trained_tokens_per_s
        lag = [f"{number_or_dash(progress.policy_lag, '{:.2f}')} batches"]
        if progress.policy_lag_max is not None:
            lag.append(f"at most {progress.policy_lag_max}")
        # The wait comes first, as it is the one that asks for another number of actors.
        phases = sorted(progress.phases.items(), key=lambda each: each[0] != "wait")
        time = [f"{name} {share:.0%}" for name, share in phases if share >= LEAST_SHARE]
        if progress.mfu is not None:
            time.insert(1, f"MFU {progress.mfu:.0%}")
        before, points = progress.accuracy_before, progress.rewards
        span = f"{min(points):.3f} to {max(points):.3f}" if points else ""
        lines = [
            self._curve("reward", progress.reward, points, span, room),
            self._curve(
                "accuracy",
                progress.accuracy,
                progress.accuracy_curve,
                "" if before is None else f"{before:.3f} before",
                room,
            ),
        ]
        if progress.accuracies:
            each = [f"{name} {value:.3f}" for name, value in progress.accuracies.items()]
            lines.append(_labelled("", each, width))
        lines += [
            _labelled(
                "tokens/s",
                [
                    f"{number_or_dash(made, '{:,.0f}')} generated",
                    f"{number_or_dash(trained, '{:,.0f}')} trained",
                ],
                width,
            ),
            _labelled("lag", lag, width),
            _labelled("learner", time or ["-"], width),
        ]
        wanted = progress.actors_wanted
        if wanted is not None and wanted != self._view.actors_alive:
            lines.append(
                _labelled("fleet", [f"{wanted} wanted", progress.actors_wanted_why], width)
            )
        if self._view.fill is not None:
            lines += self._buffer(self._view.fill, width)
        return lines

    def actors(self, width: int, height: int) -> list[Text]:
        """A line for each actor, as far as there is room."""
        return actor_lines(self._view, width, height)

    def sample(self, width: int) -> list[Text]:
        """The newest text, its ends where it is long."""
        sample = self._view.sample
        if sample is None:
            return []
        about = [f"batch {sample.step}", f"reward {sample.reward:.3g}", sample.finish]
        if sample.kind == "eval":
            about.insert(1, "held out")
        lines = [_labelled("text", about, width)]
        for who, text, rows in (("prompt", sample.prompt, 1), ("answer", sample.text, 2)):
            room = width - LABEL
            shown = ends(printable(" ".join(text.split())), room * rows)
            for at, row in enumerate(folded(shown, room)[:rows]):
                line = Text((f"  {who}" if not at else "").ljust(LABEL), style="dim")
                lines.append(line.append(row, style="not dim"))
        return lines

    def notes(self, width: int, most: int) -> list[Text]:
        """What is wrong, and what the diagnosis of it is, on so many lines."""
        view = self._view
        notes = [("ALARM", view.alarm)] if view.alarm is not None else []
        notes += [("CLOSED", each) for each in view.closed if each != view.alarm]
        if view.progress.alerts is not None:
            notes.append(("ALERT", view.progress.alerts))
        notes += [("ADVICE", each) for each in view.progress.advice.values()]
        lines = []
        for kind, text in notes:
            rows = wrapped(
                printable(text),
                width - LABEL,
                most=NOTE_LINES if kind == "ALERT" else REMEDY_LINES,
            )
            for at, row in enumerate(rows):
                line = Text((kind if not at else "").ljust(LABEL), style="bold red")
                lines.append(line.append(row, style="not bold default"))
        if len(lines) <= most:
            return lines
        more = Text(" " * LABEL + "… more in the learner's log", style="bold")
        return [*lines[: most - 1], more]

    def _curve(
        self, label: str, value: float | None, points: Sequence[float], about: str, room: int
    ) -> Text:
        line = Text(label.ljust(LABEL), style="dim")
        line.append(number_or_dash(value, "{:.3f}").ljust(7), style="not dim bold")
        room -= 7
        about = f"  {about}" if about and len(about) + 12 <= room else ""
        drawn = sparkline(points, min(CURVE, room - len(about)), ascii_only=self._ascii)
        line.append(drawn, style="not dim green")
        line.append(about, style="dim")
        return line

    def _buffer(self, fill: Fill, width: int) -> list[Text]:
        of = f"{fill.groups} of {fill.admitted} groups"
        parts = [
            f"{fill.sampling} sampling",
            f"{fill.waiting} waiting",
            f"{fill.claimed} in a batch",
        ]
        share = fill.groups / fill.admitted if fill.admitted else 0.0
        line = Text("buffer".ljust(LABEL), style="dim")
        line.append_text(bar(share, FILL, ascii_only=self._ascii))
        line.append("  " + fitting([of, *parts], width - LABEL - FILL - 2), style="not dim")
        lines = [line]
        gone = [f"{count:,} {why}" for why, count in self._view.progress.dropped.items()]
        more = [f"{fill.memory:.0%} of Redis used"] if fill.memory >= LEAST_SHARE else []
        if gone:
            more.insert(0, f"dropped groups: {', '.join(gone)}")
        if more:
            lines.append(_labelled("", more, width))
        return lines


def _labelled(label: str, parts: Iterable[str], width: int, *, column: int = LABEL) -> Text:
    """A line with its name at the left."""
    name = cut(printable(label), column - 1)
    line = Text(name + " " * (column - cell_len(name)), style="dim")
    line.append(fitting([printable(part) for part in parts], width - column), style="not dim")
    return line
