"""Samples on a terminal of any width: text blocks with a rule above each, or columns by step.

Texts, names and reasons come from actors: what a terminal would obey is written out. Nothing
depends on colour.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from configs.printable import printable, printable_lines
from learner.reporting.sample_lines import SampleLine, logprobs_of

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
    """Print samples one below the other."""
    for sample in samples:
        console.print(Rule(Text(printable(title(sample))), align="left", style=NO_STYLE))
        blocks = [("prompt", sample.prompt), *((turn.by, turn.text) for turn in sample.turns)]
        for name, text in blocks:
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
    """Print lines in ASCII: a terminal finds nothing in them to obey."""
    for line in lines:
        fields = msgspec.to_builtins(line)
        try:
            fields["logprobs"] = logprobs_of(line)
        except ValueError:
            fields["logprobs"] = None
        sys.stdout.write(json.dumps({**fields, "text": line.text}) + "\n")


def _answer(console: Console, sample: SampleLine, *, width: int, full: bool) -> RenderableType:
    parts: list[RenderableType] = []
    for turn in sample.turns:
        if len(sample.turns) > 1:
            parts.append(Text(turn.by, style="bold"))
        parts.append(_body(console, turn.text, width=width, full=full))
    parts.append(Text(printable(_numbers(sample.parts)), style="dim"))
    return Group(*parts)


def _kind_of_answer(sample: SampleLine) -> str:
    return "greedy answer" if sample.sample == 0 else f"answer {sample.sample}"


def _facts(sample: SampleLine) -> Iterator[tuple[str, str]]:
    """Yield names and values of what else is known."""
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
