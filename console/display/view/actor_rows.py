"""A line for each actor of a run: weights, speed, use, and when it was last heard."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from buffer.operations.values import ActorSeen
from configs.printable import printable
from console.display.figures import duration, wanted_actors
from console.display.snapshot import View

from .lines import cut

COLUMNS = ("weights", "tokens/s", "in flight", "use", "heard")
FIRST_TO_GO = ("in flight", "weights", "use")  # where there is no room
NAME = 18  # columns that a name should have
INDENT = 2


def actor_lines(view: View, width: int, height: int) -> list[Text]:
    """Write the actors as at most `height` lines; those that fell silent come last."""
    gone = sum(_is_silent(view, actor) for actor in view.actors)
    title = f"actors    {wanted_actors(view)}" + (f", {gone} gone" if gone else "")
    if not view.actors or height < 3:
        return [Text(cut(title, width))][: max(0, height)]
    in_order = sorted(view.actors, key=lambda each: (_is_silent(view, each), each.incarnation))
    shown = in_order if len(in_order) < height else in_order[: height - 2]
    rows = [_row(view, actor) for actor in shown]
    names = [_name(actor) for actor in shown]
    columns = _columns(rows, [title, *names], width)
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in columns]
    room = width - sum(column + 2 for column in widths)
    lines = [_line(title, columns, widths, room, style="dim")]
    for name, row in zip(names, rows, strict=True):
        lines.append(_line(" " * INDENT + name, [row[each] for each in columns], widths, room))
    if len(shown) < len(in_order):
        left_out = in_order[len(shown) :]
        speed = sum(_figure(actor, "tokens_per_s") for actor in left_out)
        lines.append(Text(cut(f"  and {len(left_out)} more, {speed:,.0f} tokens/s", width)))
    return lines


def _columns(rows: Sequence[dict[str, str]], names: Sequence[str], width: int) -> list[str]:
    """Choose the columns: all that leave a name its room."""
    columns: list[str] = list(COLUMNS)
    room = min(NAME, max(map(cell_len, names))) + INDENT
    for name in FIRST_TO_GO:
        taken = sum(2 + max(len(each), *(len(row[each]) for row in rows)) for each in columns)
        if taken + room <= width:
            break
        columns.remove(name)
    return columns


def _line(
    name: str, values: Sequence[str], widths: Sequence[int], room: int, *, style: str = ""
) -> Text:
    short = cut(name, room)
    line = short + " " * (max(0, room) - cell_len(short))
    line += "".join(f"  {value:>{size}}" for value, size in zip(values, widths, strict=True))
    return Text(line, style=style)


def _row(view: View, actor: ActorSeen) -> dict[str, str]:
    capacity, in_flight = _figure(actor, "capacity"), _figure(actor, "in_flight")
    heard = f"{duration(actor.silent_s)} ago"
    if _is_silent(view, actor):
        return dict.fromkeys(COLUMNS, "-") | {"tokens/s": "silent", "heard": heard}
    return {
        "weights": printable(actor.fields.get("version", "none")),
        "tokens/s": f"{_figure(actor, 'tokens_per_s'):,.0f}",
        "in flight": f"{in_flight:.0f} of {capacity:.0f}",
        "use": f"{in_flight / capacity:.0%}" if capacity else "-",
        "heard": heard,
    }


def _name(actor: ActorSeen) -> str:
    host = actor.fields.get("host")
    return printable(actor.incarnation + (f" on {host}" if host else ""))


def _is_silent(view: View, actor: ActorSeen) -> bool:
    return actor.silent_s > view.silent_after_s


def _figure(actor: ActorSeen, name: str) -> float:
    try:
        return float(actor.fields.get(name, "0"))
    except ValueError:
        return 0.0
