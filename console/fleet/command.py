"""`nyala fleet`: recipes for schedulers, and jobs by the number of actors that a run wants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs.loader import load
from console.run.run_folder import run_folder_of

from .follow import SlurmFleet
from .render import Target, render

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Write recipes for Kubernetes, Slurm or SkyPilot, and follow the number of actors.\n\n"
    "Example: `nyala fleet render mine.yaml k8s --to kubernetes`",
)


@app.command("render")
def write_recipes(
    config: Annotated[
        Path, typer.Argument(metavar="RUN|CONFIG", help="A run's folder, or its settings.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the recipes, with the run's keys.")],
    to: Annotated[Target, typer.Option(help="The scheduler.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a setting; repeatable."),
    ] = None,
) -> None:
    """Write the recipes of a run: hub, actors, and how many of them.

    The first file's head has the commands. Keys that are there already are kept.

    Example: `nyala fleet render mine.yaml k8s --to kubernetes`
    """
    file = config / "config.yaml" if config.is_dir() else config
    for path in render(load(file, overrides or []), to, out):
        print(path)


@app.command()
def follow(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    script: Annotated[Path, typer.Argument(help="actor.sh, as `nyala fleet render` writes it.")],
    partition: Annotated[str, typer.Option(help="Of Slurm, where jobs may be preempted.")],
) -> None:
    """Keep as many actors' jobs under Slurm as the run wants, until it has ended.

    Runs where sbatch does; may be ended and started again at any time.

    Example: `nyala fleet follow runs/mine slurm/actor.sh --partition spot`
    """
    SlurmFleet(run_folder_of(run), script, [f"--partition={partition}"]).follow()
