"""`nyala push`: the trained model of a run on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs.errors import SettingsError
from console.arguments import Run
from console.report.model_card import CARD, write_card
from console.run.run_folder import RunFolder, RunState, run_folder_of, settings_of
from console.samples.model_of_run import model_of
from console.samples.try_command import Checkpoint

from .hub import upload

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def push(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Of the model on the hub.")],
    *,
    checkpoint: Checkpoint = None,
    private: Annotated[bool, typer.Option("--private", help="Only its owner may see it.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="A branch; else main.")
    ] = None,
) -> None:
    """Upload the trained model of a run to the Hugging Face hub.

    That of the end of the run, else of the newest checkpoint, with its model card. It is one
    commit, so nobody sees half of it. The token is that of HF_TOKEN or `hf auth login`.

    Example: `nyala push runs/demo me/speller --private`
    """
    if name.count("/") != 1 or not all(name.split("/")):
        raise typer.BadParameter(f"the name on the hub must be OWNER/NAME, got {name!r}")
    folder = run_folder_of(run)
    _refuse_untrained(folder)
    settings = settings_of(folder.path)
    with model_of(settings, checkpoint) as model:
        path = Path(model.path)
        if not (path / CARD).exists():
            write_card(path, settings, model.step)
        where = upload(
            path,
            name,
            private=private,
            revision=revision,
            message=f"{settings.run.name}: {model.name}",
        )
    print(f"{model.name} of {settings.run.name} is at {where}")


def _refuse_untrained(folder: RunFolder) -> None:
    """Keep the model that a run begins with from being published as its own.

    Raises:
        SettingsError: There is no other yet.
    """
    if folder.state is not RunState.FINISHED and folder.newest_checkpoint() is None:
        raise SettingsError(
            f"{folder.path} must have trained a model to upload, got a run without a checkpoint; "
            f"look at it with `nyala status {folder.path}`"
        )
