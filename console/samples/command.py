"""`nyala samples`: what a run samples, as text."""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from console.arguments import Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of
from learner.reporting.sample_files import read_samples

from .query import Found, Pick, Query, choose, follow, parse_steps
from .view import print_json_lines, print_samples, print_side_by_side

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Kind(StrEnum):
    """Where a sample is from."""

    TRAIN = "train"
    EVAL = "eval"


Count = Annotated[int, typer.Option("-n", min=1, max=10_000, help="How many.")]
Step = Annotated[str, typer.Option("--step", help="50, 20..60, all, or the newest that has any.")]
Part = Annotated[str | None, typer.Option(help="Rank by this part of the reward, such as exact.")]
Finish = Annotated[
    str | None, typer.Option(help="Those that ended so: stop, length or environment.")
]
Actor = Annotated[str | None, typer.Option(help="Those of one actor: its name begins so.")]
FollowPrompt = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="One question at -n steps side by side: words of its prompt, its digest, or any.",
    ),
]


@app.command()
def samples(
    run: Run,
    *,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest.")] = False,
    n: Count = 3,
    every: Annotated[bool, typer.Option("--all", help="All that fit, in their order.")] = False,
    step: Step = "newest",
    kind: Annotated[Kind | None, typer.Option(help="Of batches, or of evaluations.")] = None,
    part: Part = None,
    finish: Finish = None,
    actor: Actor = None,
    environment: Annotated[str | None, typer.Option(help="Those of one environment.")] = None,
    follow_prompt: FollowPrompt = None,
    full: Annotated[bool, typer.Option("--full", help="Long texts whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Show texts that a run has sampled.

    At random, unless --best or --worst is given. The learner keeps a few groups of every tenth
    batch and the answers of every evaluation (run.samples). The run may be training meanwhile.

    Cut off: `nyala samples runs/demo --step all --finish length`

    How an answer changed: `nyala samples runs/demo --follow-prompt any --kind eval`

    Example: `nyala samples runs/demo --worst -n 5`
    """
    if best and worst:
        raise SettingsError("--best and --worst must be given one at a time, got both")
    folder = run_folder_of(run).path
    is_default = follow_prompt is not None and step == "newest"
    query = Query(
        pick=Pick.BEST if best else Pick.WORST if worst else Pick.RANDOM,
        steps=parse_steps("all" if is_default else step),
        kind=kind,
        part=part,
        finish=finish,
        actor=actor,
        environment=environment,
    )
    most = None if every else n
    if follow_prompt is None:
        found = choose(lambda: read_samples(folder), query, n=most, random=Random())
    else:
        found = follow(
            lambda: read_samples(folder), query, prompt=follow_prompt, n=most, random=Random()
        )
    if as_json:
        print_json_lines(found.samples)
        return
    console = Console()
    print_line(console, _summary(found, query, is_followed=follow_prompt is not None))
    show = print_samples if follow_prompt is None else print_side_by_side
    show(console, found.samples, full=full)


def _summary(found: Found, query: Query, *, is_followed: bool) -> str:
    """Write how many there were to choose from."""
    shown = f"{len(found.samples)} of {found.fitting:,}"
    if is_followed:
        return f"{shown} steps at which this question was kept"
    if len(found.samples) == found.fitting:
        return f"all {found.fitting:,} samples that fit"
    by = "" if query.part is None else f" by {query.part}"
    chosen = "at random" if query.pick is Pick.RANDOM else f"the {query.pick}{by}"
    return f"{shown} samples that fit, {chosen}"
