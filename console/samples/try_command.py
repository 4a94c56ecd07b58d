"""`nyala try`: a prompt of one's own to the newest model of a run."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from configs.printable import printable, printable_lines
from console.arguments import Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of, settings_of

from .model_of_run import model_of

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
    n: Annotated[int, typer.Option("-n", min=1, max=64, help="How many answers.")] = 1,
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
        for each in answers:
            sys.stdout.write(json.dumps({"model": model.name, "prompt": text, **each.as_json()}))
            sys.stdout.write("\n")
        return
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    print_line(console, f"{model.name} of {settings.run.name}, {how}")
    for each in answers:
        title = printable(f"{each.tokens} tokens, {each.finish}")
        console.print(Rule(Text(title), align="left", style=""))
        console.print(Padding(Text(printable_lines(each.text)), (0, 0, 0, 2)))
