"""`nyala chaos`: what a person sees of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.errors import NyalaError, SettingsError
from console.chaos.fault import Fault, Row, markdown
from console.chaos.matrix import FAULTS, Plan, run_matrix


@dataclass(frozen=True, slots=True)
class Wish:
    """What was typed."""

    config: Path | None
    overrides: tuple[str, ...]
    only: tuple[str, ...]
    engine: str | None
    out: Path | None


def list_faults() -> None:
    """Print the names that `--only` takes."""
    for fault in FAULTS:
        obstacle = fault.obstacle()
        print(f"{fault.name:28} {fault.what}" + (f"  [not here: {obstacle}]" if obstacle else ""))


def chosen(only: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of these names; all for none.

    Raises:
        SettingsError: There is no such fault.
    """
    known = {fault.name: fault for fault in FAULTS}
    for name in only:
        if name not in known:
            raise SettingsError(
                f"--only must be the name of a fault, got {name!r}; `nyala chaos --list` shows them"
            )
    return tuple(known[name] for name in only) if only else FAULTS


def run_chaos(wish: Wish) -> int:
    """Carry `nyala chaos` out: 0 if everything held, 1 if not, 2 if it could not be started."""
    console = Console()
    try:
        rows = _with_bar(_plan(wish), console)
    except NyalaError as error:
        print(f"nyala: {error}", file=sys.stderr)
        return 2
    return 0 if all(row.holds for row in rows) else 1


def _plan(wish: Wish) -> Plan:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = (wish.out or Path("runs") / f"chaos-{stamp}").expanduser().resolve()
    if folder.exists():
        raise SettingsError(f"--out must be a new folder, got {folder}, which exists; name another")
    overrides = wish.overrides
    if wish.engine is not None:
        overrides = (f"actors.engine={wish.engine}", *overrides)
    return Plan(folder, wish.config, overrides, chosen(wish.only))


def _with_bar(plan: Plan, console: Console) -> list[Row]:
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting a run", total=len(plan.faults))

        def watch(done: int, newest: Row | None, now: str) -> None:
            if newest is not None:
                progress.console.print(" | ".join(newest.cells()), markup=False, highlight=False)
            progress.update(bar, completed=done, description=now)

        rows = run_matrix(plan, watch)
    console.print(markdown(rows), markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {plan.folder}/faults.md and faults.json", soft_wrap=True)
    return rows
