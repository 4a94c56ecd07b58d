"""`nyala losses` and `nyala schema`: what the settings of a run can be."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from configs.loader import json_schema

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def losses(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One name, or a method such as DAPO.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/algorithms.md.")
    ] = False,
) -> None:
    """List the mathematics that settings can choose.

    Advantages, corrections, surrogates and aggregations with formula, paper, defaults and when to
    use them; then which of them together are a method of the field.

    Example: `nyala losses tis`
    """
    from .loss_catalogue import show_losses  # noqa: PLC0415 - torch

    show_losses(name, as_json=as_json, markdown=markdown)


@app.command()
def schema() -> None:
    """Print the JSON schema of the settings.

    Editors complete and check settings files with it.

    Example: `nyala schema > configs/settings.schema.json`
    """
    sys.stdout.write(json_schema())
