"""Lines of text that fit a number of columns, and bars of characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

BETWEEN = " … "


def cut(text: str, room: int) -> str:
    """Return the beginning of a text, with an ellipsis where it would go on."""
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
    """Return a text without its middle where it is long: how it begins, and how it ends."""
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
    """Put lines beside others, from column `at` on."""
    lines = []
    for row in range(max(len(left), len(right))):
        line = Text().append_text(left[row]) if row < len(left) else Text()
        if row < len(right):
            line.append(" " * (at - line.cell_len))
            line.append_text(right[row])
        lines.append(line)
    return lines
