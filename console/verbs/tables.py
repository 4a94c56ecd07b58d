"""Output of the verbs: a title and a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.errors import printable
from console.display.display import print_line


@dataclass(frozen=True, slots=True)
class ResultTable:
    """The result of a verb, as a title and rows."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    """All with the same columns."""
    full: Mapping[str, Any] | None = None
    """Shown instead of the rows as JSON."""


def print_facts(facts: ResultTable, *, as_json: bool, console: Console | None = None) -> None:
    """Print the result of a verb to stdout."""
    if as_json:
        shown = facts.rows if facts.full is None else facts.full
        sys.stdout.write(json.dumps(shown, indent=2, default=str) + "\n")
        return
    console = console or Console()
    print_line(console, facts.title)
    if not facts.rows:
        return
    table = Table(box=None, pad_edge=False)
    for name, value in facts.rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left")
    for row in facts.rows:
        # What actors sent is text: neither markup nor a terminal's commands.
        table.add_row(*(Text(printable(_cell(value))) for value in row.values()))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(part) for part in value)
    return str(value)
