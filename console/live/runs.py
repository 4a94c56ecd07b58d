"""`nyala runs`: the runs of one Redis, as their stores describe them."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from buffer import operations
from buffer.admin import list_runs
from buffer.store import Store
from configs.errors import SettingsError, printable
from configs.secrets import VARIABLE, redis_url_of
from console.command_line import AsJson
from console.display.snapshot import duration

SILENT_S = 30.0
"""An actor that has been silent for longer does not count."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)
Url = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help=f"URL of Redis, as buffer.url; default: {VARIABLE}, where a password stays private.",
        show_default=False,
    ),
]


@app.command()
def runs(redis: Url = None, as_json: AsJson = False) -> None:
    """List the runs of a Redis.

    For each its state, batches trained, actors, bytes of records and unfinished completions, and
    when an actor was last heard. The user of the URL must be allowed to read all runs.

    Example: `nyala runs --redis redis://127.0.0.1:6379/0`
    """
    url = redis or redis_url_of()
    if url is None:
        raise SettingsError(
            f"--redis must be the URL of a Redis server, got none; give it, or set {VARIABLE}"
        )
    described = [describe(url, name) for name in list_runs(url)]
    if as_json:
        sys.stdout.write(json.dumps(described, indent=2) + "\n")
        return
    Console().print(_table(described) if described else "no run is in this Redis")


def describe(url: str, run: str) -> dict[str, Any]:
    """Describe one run: its state, batches trained, live actors, bytes in Redis.

    `last_seen_s` is the time since an actor was last heard, None if none was within the hour.

    Raises:
        StoreError: Redis does not answer.
    """
    with Store(url, run) as store:
        stats, seen = store.run(operations.stats()), store.run(operations.actors())
        memory = store.run(operations.memory(of_run=True))
    silences = [actor.silent_s for actor in seen]
    return {
        "run": run,
        "state": stats.state,
        "version": stats.version,
        "lineage": stats.lineage,
        "actors": sum(actor.is_present(SILENT_S) for actor in seen),
        "bytes": memory.run_bytes,
        "last_seen_s": min(silences, default=None),
    }


def _table(described: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("run")
    table.add_column("state")
    for name in ("version", "actors", "MiB", "last seen"):
        table.add_column(name, justify="right")
    for row in described:
        silent_s = row["last_seen_s"]
        table.add_row(
            printable(row["run"]),
            row["state"],
            f"{row['lineage']}.{row['version']}",
            str(row["actors"]),
            f"{row['bytes'] / 2**20:.1f}",
            "-" if silent_s is None else f"{duration(silent_s)} ago",
        )
    return table
