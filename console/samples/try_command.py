"""`nyala try`: a prompt of one's own to the newest model of a run, or to a checkpoint.

`nyala eval` and `nyala push` find a run's model with `model_of` too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from configs.architecture import present_model
from configs.errors import printable, printable_lines
from configs.logging import quiet_libraries
from configs.settings import Settings
from console.command_line import Run
from console.display.display import print_line
from console.run.run_folder import RunFolder, RunState, run_folder_of, settings_of
from learner.checkpointing.folders import step_of

# --------------------------------------------------------------------------------------------------
# The newest model of a run, or that of a checkpoint, as a folder that an engine can load.


class ModelOfRun(NamedTuple):
    """A model of a run."""

    name: str
    """Name of the checkpoint, or of the model that stands in for it."""
    path: str
    step: int
    """Batches that it was trained on."""


@contextmanager
def model_of(settings: Settings, checkpoint: str | None) -> Iterator[ModelOfRun]:
    """Find or export a model; what is exported is removed afterwards.

    Without a checkpoint's name: the model of a finished run, else that of the newest checkpoint,
    else the one that the run began with.

    Args:
        settings: Settings of the run.
        checkpoint: `best`, a step such as `50`, or a name such as `step-000050`.

    Raises:
        CheckpointError: The checkpoint is not there, not intact, or of another run.
        SettingsError: There is no model yet.
    """
    run = settings.run
    folder = RunFolder(run.folder)
    if checkpoint is None and folder.state is RunState.FINISHED and _is_model(folder.model):
        yield ModelOfRun(f"the model after batch {run.steps}", str(folder.model), run.steps)
    elif checkpoint is None and folder.newest_checkpoint() is None:
        yield ModelOfRun("the model that the run began with", present_model(run), 0)
    else:
        from learner.checkpointing.export import export_model  # noqa: PLC0415 - torch
        from learner.checkpointing.inventory import intact  # noqa: PLC0415 - torch

        path = intact(run.folder, _name(checkpoint))
        # Beside the checkpoints: where they have room, a model has.
        with tempfile.TemporaryDirectory(prefix=".try-", dir=run.folder) as scratch:
            exported = Path(scratch) / "model"
            export_model(path, run, exported)
            yield ModelOfRun(path.name, str(exported), step_of(path))


def _name(checkpoint: str | None) -> str | None:
    if checkpoint is None or not checkpoint.isdecimal():
        return checkpoint
    return f"step-{int(checkpoint):06d}"


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists()


# --------------------------------------------------------------------------------------------------
# `nyala try`: a prompt of one's own to the newest model of a run.

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="N|best", help="The model after batch N, or the best."),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0, max=5, help="0 = greedy, and so is one answer; several: as in the run."),
]


@app.command("try")
def try_prompt(
    run: Run,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="A text; - reads it from stdin.")],
    *,
    checkpoint: Checkpoint = None,
    n: Annotated[int, typer.Option("-n", min=1, max=64, help="Number of answers.")] = 1,
    temperature: Temperature = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; else as in the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Ask the newest model of a run.

    System prompt, chat template and stop rules are the run's; the environment adds nothing, so
    write the prompt as the environment does (`nyala samples RUN` shows it). A small torch engine
    answers. The run may be training meanwhile: its newest checkpoint is verified and exported for
    this.

    Example: `nyala try runs/demo "spell this backwards: abc" --checkpoint best`
    """
    from .answers import answer  # noqa: PLC0415 - torch

    quiet_libraries()
    settings = settings_of(run_folder_of(run).path)
    text = sys.stdin.read() if prompt == "-" else prompt
    if temperature is None:
        temperature = 0.0 if n == 1 else settings.run.temperature
    console = Console(stderr=as_json)
    with (
        console.status("looking for the model") as status,
        model_of(settings, checkpoint) as model,
    ):
        status.update(f"loading {model.name}")
        answers = asyncio.run(
            answer(
                settings,
                model.path,
                text,
                n=n,
                temperature=temperature,
                max_tokens=max_tokens,
                on_tokens=lambda count: status.update(f"{model.name}: {count} tokens"),
            )
        )
    if as_json:
        for reply in answers:
            sys.stdout.write(json.dumps({"model": model.name, "prompt": text, **reply.as_json()}))
            sys.stdout.write("\n")
        return
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    print_line(console, f"{model.name} of {settings.run.name}, {how}")
    for reply in answers:
        title = printable(f"{reply.tokens} tokens, {reply.finish}")
        console.print(Rule(Text(title), align="left", style=""))
        console.print(Padding(Text(printable_lines(reply.text)), (0, 0, 0, 2)))
