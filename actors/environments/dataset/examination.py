"""Examination of a dataset before a run is trained on it: counts, lengths, answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from statistics import median
from typing import NamedTuple

from actors.chat import Prompt, read_prompt
from configs.settings import RunSettings

from .environment import Dataset, DatasetConversation


class Finding(NamedTuple):
    """One line of an examination."""

    what: str
    found: str
    advice: str = ""
    """What to do about it; empty = nothing."""


def examine(
    dataset: Dataset, run: RunSettings, *, tokens: Callable[[Prompt], int], rows: int
) -> Iterator[Finding]:
    """Look at the first rows of both sides.

    Args:
        dataset: All of it.
        run: Its limits.
        tokens: Counts those of a prompt, with all that the template puts around it.
        rows: How many to look at.
    """
    seen = list(islice(dataset.all_rows(), rows))
    training, held_out, left_out = dataset.counts
    few = run.eval_episodes > held_out > 0
    yield Finding("rows to train on", f"{training:,}")
    yield Finding(
        "rows held out",
        f"{held_out:,}",
        f"an evaluation of {run.eval_episodes} asks some twice" if few else "",
    )
    if left_out:
        yield Finding("rows left out", f"{left_out:,}", "they are held out, too")
    yield Finding("columns", ", ".join(seen[0][0].columns))
    prompts = [read_prompt(conversation.prompt) for conversation, _ in seen]
    yield _lengths("prompt", map(tokens, prompts), run.max_prompt_tokens, "run.max_prompt_tokens")
    answers = [c.answer for c, _ in seen if c.answer is not None]
    if answers:
        limit, name = run.max_completion_tokens, "run.max_completion_tokens"
        yield _lengths("answer", map(tokens, answers), limit, name)
    asked = Counter(conversation.identity for conversation, _ in seen)
    again = sum(asked.values()) - len(asked)
    yield Finding("questions asked twice", f"{again:,}", "they count twice as much" * bool(again))
    if answers and not dataset.describes_answers:
        yield _said_back([conversation for conversation, _ in seen])


def _lengths(what: str, counts: Iterable[int], limit: int, setting: str) -> Finding:
    lengths = sorted(counts)
    over = sum(length > limit for length in lengths)
    found = f"{lengths[0]} to {lengths[-1]}, median {median(lengths):g}, {setting} {limit}"
    advice = f"{over} of {len(lengths)} are too long: raise {setting}, or leave them out"
    return Finding(f"{what}, tokens", found, advice if over else "")


def _said_back(conversations: list[DatasetConversation]) -> Finding:
    right: list[bool] = []
    for conversation in conversations:
        conversation.step(conversation.answer or "")
        right.append(conversation.score().parts["exact"] == 1.0)
    found = f"{sum(right)} of {len(right)} right"
    if all(right):
        return Finding("answers, said back to the scorer", found)
    wrong = conversations[right.index(False)].answer
    return Finding(
        "answers, said back to the scorer", found, f"the first that is not: {wrong!r:.60}"
    )
