"""Markdown: tables, and texts of other people inside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


def on_one_line(text: str) -> str:
    """Return the text of a cell that may have markup, on one line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def literal(text: str) -> str:
    """Return the text of a cell that is shown as it is, whatever characters it has."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|~#":
        text = text.replace(character, f"\\{character}")
    return " <br> ".join(text.splitlines())


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    cell: Callable[[str], str] = on_one_line,
) -> str:
    """Write a table in Markdown.

    Args:
        head: The names of the columns.
        rows: The cells below them.
        cell: Makes a text fit for a cell.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def code(text: str) -> str:
    """Write a text in backticks, without markup. White space becomes spaces, and backticks `'`.

    Bars stay; a cell of `table` escapes them.
    """
    plain = " ".join(text.split()).replace("`", "'")
    return f"`{plain}`"


def block(text: str) -> str:
    """Write a text of several lines as it is: fenced with more backticks than it has in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
