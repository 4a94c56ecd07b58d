"""`nyala chaos`: its options, its progress and its results on the terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from configs.errors import SettingsError
from console.command_line import Overrides

from .endurance.endurance import endure
from .fault_case import Fault, FaultResult, results_as_markdown
from .kill_run import Harm, KillPlan, kill_runs
from .matrix import FAULTS, Plan, run_matrix
from .pair_case import draw_pairs, resumed_episodes

TERMINATED = 128 + signal.SIGTERM
SWEEPS = 3  # matrices of `--long`: each other seed meets the faults in other states


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of one `nyala chaos`."""

    config: Path | None
    overrides: tuple[str, ...]
    only: tuple[str, ...]
    engine: str | None
    out: Path | None
    is_long: bool = False
    is_kill_run: bool = False
    """Only the kill runs, the last part of `is_long`."""
    pairs_seed: int | None = None
    """Seed of pairs of faults; None = single faults."""
    minutes: float | None = None
    """Minutes of an endurance run; None = no endurance run."""
    seed: int = 0
    """Seed of the faults of an endurance run."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All faults that `only` chooses from."""
        return FAULTS if self.pairs_seed is None else draw_pairs(self.pairs_seed)


@app.command()
def chaos(  # noqa: PLR0917 - typer calls it by name
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="A settings file; without one, a tiny run of its own."
        ),
    ] = None,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="This fault; may be given several times."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Of the actors: torch (default) or vllm.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for table, runs and logs.")
    ] = None,
    long: Annotated[
        bool,
        typer.Option("--long", help="Several matrices, then whole runs whose actors keep dying."),
    ] = False,
    kill_run: Annotated[
        bool, typer.Option("--kill-run", help="Only the whole runs whose actors keep dying.")
    ] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Forty pairs of faults at once, drawn from --seed.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", help="Random faults beside a lying actor for so long."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of pairs and random faults.")] = 0,
    names: Annotated[bool, typer.Option("--list", help="Name the faults and end.")] = False,
) -> None:
    """Hurt a live run on purpose and record what happened.

    Starts a small run of its own on this machine, injects one fault after the other, and writes a
    table: how soon each was noticed, how soon all work went on, what was lost, what still held.

    Example: `nyala chaos --only actor-kill`
    """
    choices = ChaosOptions(
        config,
        tuple(overrides or ()),
        tuple(only or ()),
        engine,
        out,
        long,
        kill_run,
        seed if pairs else None,
        minutes,
        seed,
    )
    if names:
        list_faults(choices.faults)
        return
    raise typer.Exit(run_chaos(choices))


def list_faults(faults: Sequence[Fault]) -> None:
    """Print the names that `--only` takes."""
    for fault in faults:
        obstacle = fault.obstacle()
        print(f"{fault.name:28} {fault.what}" + (f"  [not here: {obstacle}]" if obstacle else ""))


def chosen(only: Sequence[str], faults: tuple[Fault, ...] = FAULTS) -> tuple[Fault, ...]:
    """Return the faults of these names, or all faults without names.

    Raises:
        SettingsError: There is no such fault.
    """
    by_name = {fault.name: fault for fault in faults}
    for name in only:
        if name not in by_name:
            raise SettingsError(
                f"--only must be the name of a fault, got {name!r}; choose one that `nyala chaos "
                f"--list` shows, or with --pairs one of `nyala chaos --pairs --list`"
            )
    return tuple(by_name[name] for name in only) if only else faults


def run_chaos(choices: ChaosOptions) -> int:
    """Carry `nyala chaos` out and return the exit code: 0 if all invariants held, else 1.

    Kill runs only measure: 0. From here on SIGTERM ends this process in order, with code 143.

    Raises:
        SettingsError: The folder for results exists, or there is no such fault.
        NyalaError: A kill run could not be started, or did not go on.
    """
    console = Console()
    # An exit ends all processes, and removes mounted disks and networks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    plan = _plan(choices)
    if choices.minutes is not None:
        return 0 if _endure(choices.minutes, choices.seed, plan, console) else 1
    if choices.is_kill_run:
        _kill_runs(choices, plan, console)
        return 0
    if choices.is_long:
        return 0 if _long(choices, plan, console) else 1
    return 0 if all(row.holds for row in _with_bar(plan, console)) else 1


def _plan(choices: ChaosOptions) -> Plan:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = (choices.out or Path("runs") / f"chaos-{stamp}").expanduser().resolve()
    if folder.exists():
        raise SettingsError(f"--out must be a new folder, got {folder}, which exists; name another")
    overrides = choices.overrides
    if choices.engine is not None:
        overrides = (f"actors.engine={choices.engine}", *overrides)
    return Plan(folder, choices.config, overrides, chosen(choices.only, choices.faults))


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )


def _long(choices: ChaosOptions, plan: Plan, console: Console) -> bool:
    """Sweep the matrix with other seeds, then let actors die for whole runs."""
    holds = True
    for seed in range(SWEEPS):
        overrides = (*plan.overrides, f"run.seed={seed}")
        sweep = replace(plan, folder=plan.folder / f"seed-{seed}", overrides=overrides)
        holds = all(row.holds for row in _with_bar(sweep, console)) and holds
    _kill_runs(choices, plan, console)
    return holds


def _endure(minutes: float, seed: int, plan: Plan, console: Console) -> bool:
    """Hurt one run for a time beside a lying actor, and show the growth of its processes."""

    def say(passed: float, line: str) -> None:
        console.print(f"{passed:5.1f} min  {line}", markup=False, highlight=False, soft_wrap=True)

    result = endure(plan, minutes=minutes, seed=seed, on_progress=say)
    console.print(result.markdown(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {plan.folder}/endurance.md and endurance.json", soft_wrap=True)
    return result.holds


def _kill_runs(choices: ChaosOptions, plan: Plan, console: Console) -> None:
    """Let actors die for whole runs."""
    kills = KillPlan(
        plan.folder / "kill-run",
        choices.config,
        choices.overrides,
        engine=choices.engine or "torch",
    )
    with Progress(*_columns(), console=console) as progress:
        bars = {harm: progress.add_task(f"actors: {harm}", total=None) for harm in kills.harms}

        def on_step(harm: Harm, step: int, steps: int) -> None:
            progress.update(bars[harm], completed=step, total=steps)

        result = kill_runs(kills, on_step)
    console.print_json(json.dumps(result))
    console.print(f"written to {kills.folder}/kill_run.json", soft_wrap=True)


def _with_bar(plan: Plan, console: Console) -> list[FaultResult]:
    with Progress(*_columns(), console=console) as progress:
        bar = progress.add_task("starting a run", total=len(plan.faults))

        def watch(done: int, newest: FaultResult | None, now: str) -> None:
            if newest is not None:
                progress.console.print(" | ".join(newest.cells()), markup=False, highlight=False)
            progress.update(bar, completed=done, description=now)

        rows = run_matrix(plan, watch)
    console.print(results_as_markdown(rows), markup=False, highlight=False, soft_wrap=True)
    resumed = resumed_episodes(plan.folder)
    console.print(f"{resumed} episodes of the trained batches were begun by another actor")
    console.print(f"written to {plan.folder}/faults.md and faults.json", soft_wrap=True)
    return rows
