"""`nyala buffer`: views of the replay buffer, and decisions about dead letters.

Owns the verbs and their help; `buffer_queries.py` asks the store, `tables.py` shows the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from console.arguments import AsJson, Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of, settings_of
from console.samples.view import print_json_lines, print_samples
from learner.reporting.sample_lines import SampleLine

from .buffer_queries import BufferOfRun, open_buffer
from .tables import Facts, print_facts

Tasks = Annotated[
    list[int] | None,
    typer.Argument(metavar="TASK...", help="Ids of dead letters.", show_default=False),
]
Count = Annotated[int, typer.Option("-n", min=1, max=1000, help="How many at most.")]
Every = Annotated[bool, typer.Option("--all", help="All dead letters of the run.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Look into the replay buffer of a run.\n\n"
    "Every task is in one place: ready, leased by an actor, buffered (finished), claimed by a "
    "batch, committed (inside a checkpoint), dropped, dead or cancelled.\n\n"
    "Example: `nyala buffer stats runs/demo`, then `nyala buffer dead list runs/demo`",
)
dead = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Decide about dead letters.\n\n"
    "A task dies after broker.max_attempts attempts without progress, or after "
    "broker.max_data_failures failures of its own (reward, environment); a batch that keeps "
    "killing the learner dies as a whole. It keeps its reason, its tokens and, if it was finished, "
    "its record. List, show, mend the cause; then requeue, or purge what is hopeless.",
)
app.add_typer(dead, name="dead")


@app.command()
def stats(run: Run, as_json: AsJson = False) -> None:
    """Count the tasks of a run by where they are.

    All counts come from the sets that hold the tasks; created is their sum, or a task was lost.

    Example: `nyala buffer stats runs/demo`
    """
    _show(run, as_json, lambda buffer: buffer.counts())


@app.command()
def peek(
    run: Run,
    n: Count = 10,
    texts: Annotated[bool, typer.Option("--texts", help="Show their episodes as text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show finished units that wait for a batch, the oldest first.

    Nothing is taken: the next batch claims them in this order. Rewards are as the actors gave them,
    before weights and punishments of `rewards`. With --texts, --json prints JSON lines.

    Example: `nyala buffer peek runs/demo -n 1 --texts`
    """
    if not texts:
        _show(run, as_json, lambda buffer: buffer.waiting(n))
        return
    with open_buffer(run) as buffer:
        lines = buffer.texts(n, settings_of(run_folder_of(run).path))
    if as_json:
        print_json_lines(lines)
        return
    console = Console()
    print_line(console, f"{len(lines)} episodes of the oldest units that wait for a batch")
    print_samples(console, lines, full=False, title=_waiting)


@app.command()
def resume(run: Run, as_json: AsJson = False) -> None:
    """Lease tasks again: to all after a pause, and to suspended keys.

    Leasing pauses when more than 10 of the last 1,000 tasks died; `nyala status` shows why, and
    `nyala buffer dead list` which. Mend the cause first.

    Example: `nyala buffer resume runs/demo`
    """
    _show(run, as_json, lambda buffer: buffer.resume())


@dead.command("list")
def list_dead(
    run: Run,
    n: Count = 50,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Skip so many.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List dead letters with their reasons, the oldest first.

    Example: `nyala buffer dead list runs/demo`
    """
    _show(run, as_json, lambda buffer: buffer.dead(offset, n))


@dead.command()
def show(
    run: Run,
    task: Annotated[int, typer.Argument(metavar="TASK", help="Id of a dead letter.")],
    as_json: AsJson = False,
) -> None:
    """Show all that a dead letter keeps.

    With --json also the ids of its tokens, to try the same text again.

    Example: `nyala buffer dead show runs/demo 4711`
    """
    _show(run, as_json, lambda buffer: buffer.dead_task(task))


@dead.command()
def requeue(run: Run, tasks: Tasks = None, every: Every = False, as_json: AsJson = False) -> None:
    """Try dead letters again.

    READY: goes on from its tokens, its unit waits for it. ANEW: its unit had ended, so all of it is
    made again. TRAINED: too late, its unit is in a batch without it. ENDED: the run is over. GONE:
    no dead letter. FORGOTTEN: Redis has lost its prompt.

    Example: `nyala buffer dead requeue runs/demo 4711 4712`
    """
    _show(run, as_json, lambda buffer: buffer.requeue(tasks or (), every=every))


@dead.command()
def purge(run: Run, tasks: Tasks = None, every: Every = False, as_json: AsJson = False) -> None:
    """Delete dead letters for good, to free their memory.

    They still count as dead, so that no task goes missing.

    Example: `nyala buffer dead purge runs/demo --all`
    """
    _show(run, as_json, lambda buffer: buffer.purge(tasks or (), every=every))


def _waiting(line: SampleLine) -> str:
    return f"group {line.group} waits, task {line.task}, reward {line.reward:.3g}, {line.finish}"


def _show(run: Path, as_json: bool, ask: Callable[[BufferOfRun], Facts]) -> None:
    """Ask the store of a run and print its answer."""
    with open_buffer(run) as buffer:
        facts = ask(buffer)
    print_facts(facts, as_json=as_json)
