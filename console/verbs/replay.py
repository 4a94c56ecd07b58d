"""`nyala replay`: kept batches of a run trained again, without Redis and actors, and compared."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.errors import SettingsError
from console.command_line import AsJson, Overrides, Run
from console.run.plan import keep_settings, role_command
from console.run.run_folder import RunFolder, run_folder_of, settings_of
from console.run.user_files import with_value
from learner.checkpointing.folders import complete_checkpoints, lend, step_of
from learner.data.kept_batches import kept_steps
from learner.data.ledger import as_ranges
from learner.reporting.journal import Journal

from .tables import ResultTable, print_facts

app = typer.Typer(add_completion=False, rich_markup_mode=None)

FROM_THE_MACHINE = frozenset(
    {"alerts", "is_replay", "lineage", "mfu", "peak_gib", "peak_tflops", "time"}
    | {"trained_tokens_per_s"}
)
"""Figures that do not follow from settings, weights and tokens; nor do those in seconds."""


@app.command()
def replay(
    run: Run,
    batches: Annotated[
        str, typer.Option("--batches", metavar="FIRST:LAST", help="Such as 100:120, or 100.")
    ],
    overrides: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the new run; RUN-replay by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train again on batches that a run has kept.

    Neither Redis nor actors take part. The run needs `learner.keep_batches`. Training begins at the
    run's checkpoint before the first batch, or at its initial model; batches between the two are
    trained first. Where no setting is changed, every figure is the same to the last bit, on the
    same processors.

    Example: `nyala replay runs/demo --batches 100:120 --set algorithm.surrogate=cispo`
    """
    source = run_folder_of(run)
    first, last = _range(batches)
    start = _start(source, first, last)
    settings = settings_of(source.path, overrides or [])
    settings = with_value(settings, "run", "model", settings.run.model_path)
    settings = with_value(settings, "run", "name", name or f"{settings.run.name}-replay")
    folder = RunFolder(settings.run.folder)
    if folder.path.exists():
        raise SettingsError(
            f"--name must be the name of a new run, got {settings.run.name}, which has a folder "
            f"already ({folder.path}); choose another, or remove the folder"
        )
    keep_settings(settings)
    if start is not None:
        lend(start, folder.path)
    command = role_command("learner", "learner", folder.config, [], settings)
    flags = ("replay", "--source", str(source.path), "--last", str(last))
    code = subprocess.run(
        [*command.arguments, *flags], env=dict(command.environment), check=False
    ).returncode
    if code:
        raise typer.Exit(code)
    print_facts(compared(source, folder), as_json=as_json)


# --------------------------------------------------------------------------------------------------
# The batches that can be replayed: all from a checkpoint on have to be kept.


def _range(text: str) -> tuple[int, int]:
    """Read the first and the last batch."""
    first, _, last = text.partition(":")
    numbers = [first, last or first]
    if not all(number.isdecimal() for number in numbers) or not 0 < int(first) <= int(numbers[1]):
        raise SettingsError(
            f"--batches must be the first and the last batch, such as 100:120, got {text}; number "
            "batches from 1"
        )
    return int(first), int(numbers[1])


def _start(source: RunFolder, first: int, last: int) -> Path | None:
    """Choose the checkpoint to begin at; None = the initial model.

    Raises:
        SettingsError: Not all batches from there on are kept.
    """
    kept = kept_steps(source.path)
    checkpoints = complete_checkpoints(source.checkpoints)
    before = [path for path in checkpoints if step_of(path) < first]
    begin = step_of(before[-1]) if before else 0
    missing = set(range(begin + 1, last + 1)) - set(kept)
    if missing:
        after = ", ".join(str(step_of(path)) for path in checkpoints) or "none"
        raise SettingsError(
            f"--batches must be kept from the checkpoint before them on, from {begin + 1} to "
            f"{last}, got {_as_ranges(kept) or 'none'} in {source.path}, and checkpoints after "
            f"batches {after}; choose batches that follow one of these, or raise "
            "learner.keep_batches and learner.keep_checkpoints while the run goes on"
        )
    return before[-1] if before else None


def _as_ranges(steps: Collection[int]) -> str:
    """Write numbers as `3, 5 to 9`."""
    ends = as_ranges(steps)
    return ", ".join(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in ends)


# --------------------------------------------------------------------------------------------------
# The figures of the replay beside those of the run.


def compared(source: RunFolder, folder: RunFolder) -> ResultTable:
    """Compare the figures of all replayed batches with those that the run wrote down."""
    theirs = {line["step"]: line for line in Journal(source.path).lines("metrics")}
    pairs = [
        (theirs[line["step"]], line)
        for line in Journal(folder.path).lines("metrics")
        if line["step"] in theirs
    ]
    names = [name for name in pairs[0][1] if _is_compared(name)] if pairs else []
    rows = [row for name in names if (row := _difference(name, pairs)) is not None]
    title = (
        f"{len(pairs)} batches in {folder.path}: all {len(names)} figures are equal to those of "
        f"{source.path}, to the last bit"
    )
    if rows:
        title = (
            f"{len(pairs)} batches in {folder.path}: {len(rows)} of {len(names)} figures differ "
            f"from those of {source.path}"
        )
    return ResultTable(title, sorted(rows, key=lambda row: int(row["first"])))


def _is_compared(name: str) -> bool:
    return name not in FROM_THE_MACHINE and name != "step" and not name.endswith("_s")


def _difference(
    name: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> dict[str, Any] | None:
    """Describe how a figure differs in the first such batch, and the largest difference.

    None where it is the same in all batches.
    """
    differing = [(run, again) for run, again in pairs if run.get(name) != again[name]]
    if not differing:
        return None
    run, again = differing[0]
    sizes = [
        abs(ours - theirs)
        for theirs, ours in ((one.get(name), other[name]) for one, other in differing)
        if isinstance(theirs, int | float) and isinstance(ours, int | float)
    ]
    return {
        "figure": name,
        "batches": len(differing),
        "first": again["step"],
        "run": _shown(run.get(name)),
        "replay": _shown(again[name]),
        "at most": float(f"{max(sizes):.3g}") if sizes else "",
    }


def _shown(figure: object) -> object:
    """Return a figure with nine digits, which a column has room for."""
    if isinstance(figure, float):
        return float(f"{figure:.9g}")
    return "a table" if isinstance(figure, dict | list) else figure
