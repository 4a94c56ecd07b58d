"""The live view of a run: a snapshot as lines for a terminal of any width and height.

Pure. Parts of a line come in the order of their weight, and the last ones are left out where they
do not fit, so that no figure is ever cut. What comes from other machines is written out. Colours
only repeat what the words say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from buffer.operations.values import ActorSeen
from configs.errors import printable
from learner.data.grades import ACCURACY, HeldOut
from learner.reporting.run_snapshot import sparkline

from .snapshot import (
    GONE_SHOWN_S,
    GroupsInFlight,
    View,
    duration,
    number_or_dash,
    until_the_batch,
    wanted_actors,
)

# --------------------------------------------------------------------------------------------------
# Lines of text that fit a number of columns, and bars of characters.

BETWEEN = " … "


def cut(text: str, room: int) -> str:
    """Return the beginning of a text, with an ellipsis where something is cut."""
    room = max(1, room)
    return text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"


def fitting(parts: Sequence[str], room: int) -> str:
    """Join as many parts as fit, from the first on; the first one alone is cut.

    Example:
        >>> fitting(["18 of 48 groups", "10 sampling", "5 waiting"], 30)
        '18 of 48 groups, 10 sampling'
    """
    text = cut(parts[0], room)
    for part in parts[1:]:
        if cell_len(text) + 2 + cell_len(part) > room:
            break
        text += f", {part}"
    return text


def ends(text: str, room: int) -> str:
    """Return a text without its middle where it is long."""
    if cell_len(text) <= room:
        return text
    head = max(0, room - len(BETWEEN)) // 2
    tail = max(0, room - len(BETWEEN) - head)
    return set_cell_size(text, head) + BETWEEN + set_cell_size(text[::-1], tail)[::-1]


def folded(text: str, room: int) -> list[str]:
    """Split a text where it reaches the end of a line, in the middle of a word or not."""
    return chop_cells(text, max(2, room)) or [""]


def wrapped(text: str, room: int, *, most: int) -> list[str]:
    """Split a text between words into at most so many lines; the last one is cut."""
    rows = [""]
    for word in text.split():
        longer = f"{rows[-1]} {word}" if rows[-1] else word
        if cell_len(longer) <= room or not rows[-1] or len(rows) == most:
            rows[-1] = longer
        else:
            rows.append(word)
    return [cut(row, room) for row in rows]


def bar(share: float, width: int, *, ascii_only: bool) -> Text:
    """Draw a share of 1 as a bar."""
    full = round(max(0.0, min(1.0, share)) * max(0, width))
    drawn = Text(("#" if ascii_only else "━") * full, style="not dim green")
    return drawn.append(("." if ascii_only else "─") * (max(0, width) - full), style="dim")


def beside(left: Sequence[Text], right: Sequence[Text], *, at: int) -> list[Text]:
    """Put lines beside other lines, from column `at` on."""
    lines = []
    for row in range(max(len(left), len(right))):
        line = Text().append_text(left[row]) if row < len(left) else Text()
        if row < len(right):
            line.append(" " * (at - line.cell_len))
            line.append_text(right[row])
        lines.append(line)
    return lines


# --------------------------------------------------------------------------------------------------
# A line for each actor of a run: weights, speed, cores, memory, and when it was last heard.

COLUMNS = ("weights", "tokens/s", "in flight", "cores", "GiB", "heard")
FIRST_TO_GO = ("GiB", "weights", "in flight", "cores")  # where there is no room
NAME = 24  # columns that a name should have
INDENT = 2


def actor_lines(view: View, width: int, height: int) -> list[Text]:
    """Write the actors as at most `height` lines; those that ended come last."""
    gone = [actor for actor in view.actors if _is_gone(view, actor)]
    left = sum(actor.has_left for actor in gone)
    counts = {"died": len(gone) - left, "left": left}
    ends = "".join(f", {count} {how}" for how, count in counts.items() if count)
    hosts = "" if view.hosts is None else f", {view.hosts} hosts of agents"
    title = f"actors    {wanted_actors(view)}{ends}{hosts}"
    listed = [
        actor
        for actor in view.actors
        if not _is_gone(view, actor) or actor.silent_s <= max(GONE_SHOWN_S, view.silent_after_s)
    ]
    if not listed or height < 3:
        return [Text(cut(title, width))][: max(0, height)]
    in_order = sorted(listed, key=lambda actor: (_is_gone(view, actor), actor.incarnation))
    shown = in_order if len(in_order) < height else in_order[: height - 2]
    rows = [_actor_cells(view, actor) for actor in shown]
    names = [_name(actor) for actor in shown]
    columns = _columns(rows, [title, *names], width)
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in columns]
    room = width - sum(column + 2 for column in widths)
    lines = [_actor_line(title, columns, widths, room, style="dim")]
    for name, row in zip(names, rows, strict=True):
        lines.append(
            _actor_line(" " * INDENT + name, [row[column] for column in columns], widths, room)
        )
    if len(shown) < len(in_order):
        left_out = in_order[len(shown) :]
        speed = sum(actor.figure("tokens_per_s") for actor in left_out)
        lines.append(Text(cut(f"  and {len(left_out)} more, {speed:,.0f} tokens/s", width)))
    return lines


def _columns(rows: Sequence[dict[str, str]], names: Sequence[str], width: int) -> list[str]:
    """Choose the columns: all that leave a name its room."""
    columns: list[str] = list(COLUMNS)
    room = min(NAME, max(map(cell_len, names))) + INDENT
    for name in FIRST_TO_GO:
        taken = sum(2 + max(len(column), *(len(row[column]) for row in rows)) for column in columns)
        if taken + room <= width:
            break
        columns.remove(name)
    return columns


def _actor_line(
    name: str, values: Sequence[str], widths: Sequence[int], room: int, *, style: str = ""
) -> Text:
    short = cut(name, room)
    line = short + " " * (max(0, room) - cell_len(short))
    line += "".join(f"  {value:>{size}}" for value, size in zip(values, widths, strict=True))
    return Text(line, style=style)


def _actor_cells(view: View, actor: ActorSeen) -> dict[str, str]:
    capacity, in_flight = actor.figure("capacity"), actor.figure("in_flight")
    heard = f"{duration(actor.silent_s)} ago"
    if _is_gone(view, actor):
        end = "left" if actor.has_left else "silent"
        return dict.fromkeys(COLUMNS, "-") | {"tokens/s": end, "heard": heard}
    return {
        "weights": printable(actor.fields.get("version", "none")),
        "tokens/s": f"{actor.figure('tokens_per_s'):,.0f}",
        "in flight": f"{in_flight:.0f} of {capacity:.0f}",
        "cores": f"{actor.figure('cores'):.1f}",
        "GiB": f"{actor.figure('memory_bytes') / 2**30:.1f}",
        "heard": heard,
    }


def _name(actor: ActorSeen) -> str:
    host = actor.fields.get("host")
    return printable(actor.incarnation + (f" on {host}" if host else ""))


def _is_gone(view: View, actor: ActorSeen) -> bool:
    return not actor.is_present(view.silent_after_s)


# --------------------------------------------------------------------------------------------------
# The live view of a run: a snapshot as lines for a terminal of any width and height.

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
        view: State of the run.
        name: Name of the run.
        width: Columns of the terminal.
        height: Lines of the terminal.
        ascii_only: Whether the terminal has no block characters.
    """
    page = _LiveViewParts(view, name, ascii_only=ascii_only)
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


class _LiveViewParts:
    """The parts of the live view."""

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
        """Write what each process is doing until the first batch."""
        names = max((cell_len(name) for name in self._view.stages), default=0)
        column = min(max(LABEL, names + 2), width // 2)
        lines = [
            _labelled(name, [stage], width, column=column)
            for name, stage in self._view.stages.items()
        ]
        sampled = until_the_batch(self._view)
        if sampled:
            label = f"batch {self._view.progress.step + 1:,}"
            lines.append(_labelled(label, sampled, width, column=column))
        return lines

    def figures(self, width: int) -> list[Text]:
        """Write the curves, the speeds, the learner's time and the buffer."""
        progress, room = self._view.progress, width - LABEL
        generated, trained = progress.tokens_per_s, progress.trained_tokens_per_s
        lag = [f"{number_or_dash(progress.policy_lag, '{:.2f}')} batches"]
        if progress.policy_lag_max is not None:
            lag.append(f"at most {progress.policy_lag_max}")
        if progress.fresh_trained is not None and progress.fresh_trained < 1:
            lag.append(f"{progress.fresh_trained:.1%} of fresh tokens trained")
        # The wait comes first, as it is the one that asks for another number of actors.
        phases = sorted(progress.phases.items(), key=lambda phase: phase[0] != "wait")
        time = [f"{name} {share:.0%}" for name, share in phases if share >= LEAST_SHARE]
        if progress.mfu is not None:
            time.insert(1, f"MFU {progress.mfu:.0%}")
        newest, before, points = progress.held_out, progress.held_out_before, progress.rewards
        span = f"{min(points):.3f} to {max(points):.3f}" if points else ""
        lines = [
            self._curve("reward", progress.reward, points, span, room),
            self._curve(
                "accuracy" if newest is not None and newest.title == ACCURACY else "held out",
                None if newest is None else newest.score,
                progress.score_curve,
                "" if before is None else f"{before.score:.3f} before",
                room,
            ),
        ]
        about = _about(newest)
        if about:
            lines.append(_labelled("", about, width))
        if progress.scores:
            scores = [f"{name} {value:.3f}" for name, value in progress.scores.items()]
            lines.append(_labelled("", scores, width))
        lines += [
            _labelled(
                "tokens/s",
                [
                    f"{number_or_dash(generated, '{:,.0f}')} generated",
                    f"{number_or_dash(trained, '{:,.0f}')} trained",
                ],
                width,
            ),
            _labelled("lag", lag, width),
            _labelled("learner", time or ["-"], width),
        ]
        wanted = progress.actors_wanted
        if wanted is not None and self._view.actors_alive not in {None, wanted}:
            lines.append(
                _labelled("fleet", [f"{wanted} wanted", progress.actors_wanted_why], width)
            )
        if self._view.fill is not None:
            lines += self._buffer(self._view.fill, width)
        return lines

    def actors(self, width: int, height: int) -> list[Text]:
        """Write a line for each actor, as far as there is room."""
        return actor_lines(self._view, width, height)

    def sample(self, width: int) -> list[Text]:
        """Write the newest text, without its middle where it is long."""
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
        """Write what is wrong and its diagnosis, in at most so many lines."""
        view = self._view
        notes = [("ALARM", view.alarm)] if view.alarm is not None else []
        notes += [("CLOSED", text) for text in view.closed if text != view.alarm]
        if view.progress.alerts is not None:
            notes.append(("ALERT", view.progress.alerts))
        notes += [("ADVICE", text) for text in view.progress.advice.values()]
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

    def _buffer(self, fill: GroupsInFlight, width: int) -> list[Text]:
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


def _about(newest: HeldOut | None) -> list[str]:
    """Name the metric of held-out answers where it is not accuracy, and their reward."""
    if newest is None:
        return []
    by = [] if newest.title == ACCURACY else [f"judged by {printable(newest.title)}"]
    return [*by, *([] if newest.reward is None else [f"held-out reward {newest.reward:.3f}"])]


def _labelled(label: str, parts: Iterable[str], width: int, *, column: int = LABEL) -> Text:
    """Return a line with its name at the left."""
    name = cut(printable(label), column - 1)
    line = Text(name + " " * (column - cell_len(name)), style="dim")
    line.append(fitting([printable(part) for part in parts], width - column), style="not dim")
    return line
