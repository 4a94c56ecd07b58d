"""`nyala join-pack`: one file with which another machine joins a run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from console.arguments import Run

from .pack import write_pack

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("join-pack")
def join_pack(
    run: Run,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where other machines reach this one.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Of the pack's key, such as site-a.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="By default NAME.nyala.")] = None,
    without_model: Annotated[
        bool,
        typer.Option(
            "--without-model", help="Leave out a model that lies at the same path elsewhere."
        ),
    ] = False,
) -> None:
    """Write one file with which another machine joins a run.

    It holds the settings, the broker's address and public key, the model if that is a folder, and
    a key of its own with which any number of actors register theirs. Copy it there, then
    `nyala actor FILE`.

    Example: `nyala join-pack runs/demo --host hub.example.org --name site-a`
    """
    name = name or f"pack-{secrets.token_hex(3)}"
    file = out or Path(f"{name}.nyala")
    write_pack(run, host, name, file, with_model=not without_model)
    print(file)
    print(f"it holds a secret; to shut its actors out: nyala keys revoke {name} --in {run}")
