"""References: `nyala settings`, `losses`, `schema`, `metrics`, `messages`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from configs.loader import json_schema
from configs.tables.algorithm import is_user_function
from console.command_line import Overrides

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def losses(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One name, a method such as DAPO, or FILE.py:FUNCTION."
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Check the function NAME as a surrogate, correction or advantage."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/algorithms.md.")
    ] = False,
) -> None:
    """List the mathematics that settings can choose.

    Advantages, corrections, surrogates and aggregations with formula, paper, defaults and when to
    use them; then which of them together are a method of the field.

    What installed packages register is listed too. A function of yours is checked as before a run
    (docs/losses.md), with the other settings of `algorithm` as they are by default or in --set.

    Example: `nyala losses tis`
    Example: `nyala losses mine.py:soft_clip --check surrogate`
    """
    from .reference_lists import check_function, show_losses  # noqa: PLC0415 - torch

    if check is not None or overrides or (name is not None and is_user_function(name)):
        check_function(name, check, overrides or ())
        return
    show_losses(name, as_json=as_json, as_markdown=markdown)


@app.command()
def settings(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A setting, a table, or part of a name.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
) -> None:
    """List all settings, with unit, values, default, and when to change them.

    Example: `nyala settings lag`
    """
    from .settings_list import as_lines, as_markdown  # noqa: PLC0415 - 0.2 s

    sys.stdout.write(as_markdown() if markdown else as_lines(name))


@app.command()
def schema() -> None:
    """Print the JSON schema of the settings.

    Editors complete and check settings files with it.

    Example: `nyala schema > configs/settings.schema.json`
    """
    sys.stdout.write(json_schema())


@app.command()
def metrics(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Part of a name or a meaning.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/metrics.md.")
    ] = False,
) -> None:
    """List all figures of a run, with unit and meaning.

    The keys of metrics.jsonl, and what each role serves for Prometheus.

    Example: `nyala metrics kl_`
    """
    from .reference_lists import metrics_as_lines, metrics_as_markdown  # noqa: PLC0415 - torch

    sys.stdout.write(metrics_as_markdown() if markdown else metrics_as_lines(text))


@app.command()
def messages(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What you see, or a few words of it.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/messages.md.")] = False,
) -> None:
    """List errors, refusals, alerts and warnings with cause and cure.

    Example: `nyala messages "no answer from the broker yet"`
    """
    from .messages import as_lines, as_markdown  # noqa: PLC0415 - 0.5 s

    sys.stdout.write(as_markdown() if markdown else as_lines(text))
