"""`nyala weights`: which versions there were, whether they are what they were, and a copy of one.

Only the verbs and what they say of themselves; `weight_queries.py` looks. Heavy libraries are
imported when a verb runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .tables import Facts

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the weights that a run has published.\n\n"
    "Each version (lineage, step) is written down with its digest in weights.jsonl when it is "
    "sealed, and is never overwritten: a learner that restarts begins a new lineage.",
)


@app.command("log")
def show_log(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="How many at most, the newest.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List versions: digest, what they held up, who got them how, and how much had changed.

    Example: `nyala weights log runs/demo -n 5`
    """
    from .weight_queries import listed

    _show(lambda: listed(run, n), as_json)


@app.command()
def verify(
    run: Run,
    file: Annotated[
        Path | None, typer.Option("--file", help="A file of `nyala weights pull`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that each version has one digest and that steps increase; with --file, its bytes too.

    Example: `nyala weights verify runs/demo --file policy.safetensors`
    """
    from .weight_queries import verified

    _show(lambda: verified(run, file), as_json)


@app.command()
def pull(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="Where to write the safetensors file.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Copy the current weights out of a run that is under way, digest checked.

    Example: `nyala weights pull runs/demo --to policy.safetensors`
    """
    from .weight_queries import pulled

    _show(lambda: pulled(run, to, timeout_s=timeout_s), as_json)


def _show(look: Callable[[], Facts], as_json: bool) -> None:
    from configs.errors import NyalaError

    from .tables import print_facts

    try:
        facts = look()
    except NyalaError as error:
        print(f"nyala: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    print_facts(facts, as_json=as_json)
