"""`nyala checkpoint`: a list of a run's checkpoints, a check, an export, removal of old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.command_line import AsJson, Run
from console.report.model_card import write_card
from console.run.run_folder import settings_of
from learner.checkpointing.folders import listed, step_of

from .tables import ResultTable, print_facts

Name = Annotated[
    str | None,
    typer.Argument(metavar="CHECKPOINT", help="Such as step-000050, or best; else the newest."),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="CHECKPOINT...", help="Such as step-000050; else all."),
]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, verify, export and remove the checkpoints of a run.\n\n"
    "A checkpoint holds weights, moments and the state of the run after a batch; the run resumes "
    "at the newest that is intact and its own. The run may be training meanwhile.\n\n"
    "Example: `nyala checkpoint list runs/demo`",
)


@app.command("list")
def list_checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints, the oldest first; the best is that of the best held-out score.

    Example: `nyala checkpoint list runs/demo`
    """
    rows = list(listed(_folder(run)))
    print_facts(ResultTable(f"{len(rows)} checkpoints of {run}", rows), as_json=as_json)


@app.command()
def verify(run: Run, checkpoints: Names = None, as_json: AsJson = False) -> None:
    """Compare every byte with its digest, and each manifest with the run's key.

    The exit code is 1 if anything is found.

    Example: `nyala checkpoint verify runs/demo step-000050`
    """
    from learner.checkpointing.inventory import verified  # noqa: PLC0415 - torch

    rows = list(verified(_folder(run), checkpoints or []))
    bad = sum(row["finding"] != "intact" for row in rows)
    title = f"{len(rows) - bad} of {len(rows)} checkpoints are intact"
    print_facts(ResultTable(title, rows), as_json=as_json)
    if bad:
        raise typer.Exit(1)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="A new folder for the model.")],
    checkpoint: Name = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters alone (LoRA), in PEFT's form.")
    ] = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory, with a model card.

    It is in run.dtype, or in float32 where adapters are merged. It is verified first. A tensor at
    a time is read, so memory for one file of 2 GiB is enough.

    Example: `nyala checkpoint export runs/demo step-000050 --to policy-50`
    """
    from learner.checkpointing.export import (  # noqa: PLC0415 - torch
        export_adapter,
        export_model,
    )
    from learner.checkpointing.inventory import intact  # noqa: PLC0415 - torch

    if to.exists():
        raise typer.BadParameter(f"{to} must be a new folder, got one that exists; name another")
    settings = settings_of(run)
    path = intact(settings.run.folder, checkpoint)
    if adapter:
        export_adapter(path, settings.run, to)
    else:
        export_model(path, settings.run, to)
        write_card(to, settings, step_of(path))
    print(f"{path.name} of {run} is exported to {to}")


@app.command()
def prune(
    run: Run,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Number of newest checkpoints to keep.")
    ],
    as_json: AsJson = False,
) -> None:
    """Remove all but the newest checkpoints, and the best where learner.keep_best is set.

    Nothing is removed if one that is to stay is not intact. Checkpoints of other runs stay.

    Example: `nyala checkpoint prune runs/demo --keep 1`
    """
    from learner.checkpointing.inventory import pruned  # noqa: PLC0415 - torch

    settings = settings_of(run)
    rows = list(pruned(settings.run.folder, keep, keep_best=settings.learner.keep_best))
    print_facts(ResultTable(f"{len(rows)} checkpoints are removed", rows), as_json=as_json)


def _folder(run: Path) -> Path:
    return settings_of(run).run.folder
