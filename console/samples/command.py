"""`nyala samples`: what a run samples, as text.

`nyala buffer peek --texts` prints its episodes with it too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from configs.errors import SettingsError, printable, printable_lines
from console.command_line import Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of
from learner.reporting.samples import SampleLine, logprobs_of, read_samples

from .query import Pick, Query, SampleSelection, choose, follow, parse_steps

# --------------------------------------------------------------------------------------------------
# Samples on a terminal of any width: text blocks with a rule above each, or columns by step.
#
# Texts, names and reasons come from actors: what a terminal would obey is written out. Nothing
# depends on colour.

HEAD_LINES, TAIL_LINES = 8, 8  # of a turn: how it begins, and the answer at its end
COLUMN = 26  # least width of a column, characters
NO_STYLE = ""


def title_of(sample: SampleLine) -> str:
    """Write when a sample was made, what it earned, and how it ended."""
    kind = "trained" if sample.kind == "train" else _kind_of_answer(sample)
    return f"step {sample.step}, {kind}, reward {sample.reward:.3g}, {sample.finish}"


def print_samples(
    console: Console,
    samples: Sequence[SampleLine],
    *,
    full: bool,
    title: Callable[[SampleLine], str] = title_of,
) -> None:
    """Print samples one below the other; long turns without their middle unless `full`."""
    for sample in samples:
        console.print(Rule(Text(printable(title(sample))), align="left", style=NO_STYLE))
        texts = [sample.prompt, *(turn.text for turn in sample.turns)]
        for name, text in zip(["prompt", *sample.headings], texts, strict=True):
            console.print(Text(name, style="bold"))
            body = _body(console, text, width=console.width - 2, full=full)
            console.print(Padding(body, (0, 0, 0, 2)))
        for name, values in _facts(sample):
            console.print(Text(printable(f"{name}: {values}"), style="dim"))
        console.print()


def print_side_by_side(console: Console, samples: Sequence[SampleLine], *, full: bool) -> None:
    """Print the answers to one question by step, as many beside each other as there is room for."""
    first = samples[0]
    console.print(Text(printable(f"question {first.question} of {first.environment}")))
    prompt = _body(console, first.prompt, width=console.width - 2, full=full)
    console.print(Padding(prompt, (0, 0, 1, 2)))
    most = max(1, console.width // COLUMN)
    for start in range(0, len(samples), most):
        row = samples[start : start + most]
        width = console.width // len(row) - 3
        table = Table(box=None, pad_edge=False, padding=(0, 3, 1, 0), expand=True)
        for sample in row:
            table.add_column(Text(printable(title_of(sample))), ratio=1, overflow="fold")
        table.add_row(*(_answer(console, sample, width=width, full=full) for sample in row))
        console.print(table)


def print_json_lines(lines: Iterable[SampleLine]) -> None:
    """Print lines in ASCII, so that they hold no commands for a terminal."""
    for line in lines:
        fields = msgspec.to_builtins(line)
        try:
            fields["logprobs"] = logprobs_of(line)
        except ValueError:
            fields["logprobs"] = None
        sys.stdout.write(json.dumps({**fields, "text": line.text}) + "\n")


def _answer(console: Console, sample: SampleLine, *, width: int, full: bool) -> RenderableType:
    parts: list[RenderableType] = []
    for heading, turn in zip(sample.headings, sample.turns, strict=True):
        if len(sample.turns) > 1:
            parts.append(Text(heading, style="bold"))
        parts.append(_body(console, turn.text, width=width, full=full))
    parts.append(Text(printable(_numbers(sample.parts)), style="dim"))
    return Group(*parts)


def _kind_of_answer(sample: SampleLine) -> str:
    return "greedy answer" if sample.sample == 0 else f"answer {sample.sample}"


def _facts(sample: SampleLine) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a sample's other facts."""
    if sample.parts:
        yield "parts", _numbers(sample.parts)
    if sample.metrics:
        yield "metrics", _numbers(sample.metrics)
    for name, text in sample.notes.items():
        yield f"note {name}", text
    versions = sorted({(lineage, step) for lineage, step, _ in sample.versions})
    yield "policy", ", ".join(f"{lineage}.{step}" for lineage, step in versions) or "none"
    masked = "" if sample.trained_tokens or sample.kind == "eval" else ", none of them trained"
    yield "tokens", f"{sample.tokens}{masked}{_mean_logprob(sample)}"
    took = max(0.0, sample.finished - sample.started)
    yield "from", f"{sample.environment}, group {sample.group}, task {sample.task}"
    yield "by", f"{sample.actor} in {took:.1f} s; question {sample.question}"


def _mean_logprob(sample: SampleLine) -> str:
    sampled = sum(turn.tokens for turn in sample.turns if turn.by == "policy")
    try:
        total = sum(logprobs_of(sample))
    except ValueError:
        return ""
    return f", {total / sampled:.2f} nats each" if sampled else ""


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def _body(console: Console, text: str, *, width: int, full: bool) -> Text:
    """Wrap a text, and leave out its middle where it is long."""
    lines = list(Text(printable_lines(text)).wrap(console, max(1, width), overflow="fold"))
    left_out = len(lines) - HEAD_LINES - TAIL_LINES
    if full or left_out <= 1:
        return Text("\n").join(lines)
    note = Text(f"[{left_out} more lines: --full]", style="italic")
    return Text("\n").join([*lines[:HEAD_LINES], note, *lines[-TAIL_LINES:]])


# --------------------------------------------------------------------------------------------------
# `nyala samples`: what a run samples, as text.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Kind(StrEnum):
    """The origin of a sample."""

    TRAIN = "train"
    EVAL = "eval"


Count = Annotated[int, typer.Option("-n", min=1, max=10_000, help="Number of samples.")]
Step = Annotated[
    str, typer.Option("--step", help="Step of the samples: 50, 20..60, all, or the newest.")
]
KindOf = Annotated[
    Kind | None,
    typer.Option(
        help="Samples of batches or of evaluations; --best and --worst choose from batches."
    ),
]
Part = Annotated[str | None, typer.Option(help="Rank by this part of the reward, such as exact.")]
Finish = Annotated[
    str | None, typer.Option(help="Only samples with this end: stop, length or environment.")
]
Actor = Annotated[str | None, typer.Option(help="Only samples of actors whose names begin so.")]
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
    best: Annotated[bool, typer.Option("--best", help="Samples with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Samples with the lowest reward.")] = False,
    n: Count = 3,
    every: Annotated[bool, typer.Option("--all", help="All that fit, in their order.")] = False,
    step: Step = "newest",
    kind: KindOf = None,
    part: Part = None,
    finish: Finish = None,
    actor: Actor = None,
    environment: Annotated[str | None, typer.Option(help="Only this environment's.")] = None,
    follow_prompt: FollowPrompt = None,
    full: Annotated[bool, typer.Option("--full", help="Print long texts whole.")] = False,
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
        raise SettingsError(
            "--best and --worst must be given one at a time, got both; leave one of the two out"
        )
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
        chosen = choose(lambda: read_samples(folder), query, n=most, random=Random())
    else:
        chosen = follow(
            lambda: read_samples(folder), query, prompt=follow_prompt, n=most, random=Random()
        )
    if as_json:
        print_json_lines(chosen.samples)
        return
    console = Console()
    print_line(console, _summary(chosen, query, is_followed=follow_prompt is not None))
    show = print_samples if follow_prompt is None else print_side_by_side
    show(console, chosen.samples, full=full)


def _summary(chosen: SampleSelection, query: Query, *, is_followed: bool) -> str:
    """Write how many samples are shown, of how many that fit."""
    shown = f"{len(chosen.samples)} of {chosen.fitting:,}"
    if is_followed:
        return f"{shown} steps at which this question was kept"
    if len(chosen.samples) == chosen.fitting:
        return f"all {chosen.fitting:,} samples that fit"
    by = "" if query.part is None else f" by {query.part}"
    if not query.is_ranked:
        return f"{shown} samples that fit, at random"
    kinds = {line.kind for line in chosen.samples}
    of = " of evaluations" if kinds == {Kind.EVAL} else ""
    return f"{shown} samples{of} that fit, the {query.pick}{by}"
