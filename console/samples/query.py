"""Choice of samples for `nyala samples`: which fit, and the best, the worst or any of them.

Reads lines one by one and holds only what may be shown, however many files a run has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nlargest
from random import Random

from configs.errors import SettingsError
from learner.reporting.samples import SampleLine

Lines = Callable[[], Iterable[SampleLine]]
"""Begins to read the lines of a run, the oldest first."""

SPARE = 256  # lines held beyond those that are shown, before the rest is let go of
NAMED = 8  # of each kind in an error
ANY = "any"
TRAIN = "train"
"""Kind of the samples of batches."""


class Pick(StrEnum):
    """The way to pick among the samples that fit."""

    BEST = "best"
    WORST = "worst"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Steps:
    """A range of steps, ends included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Query:
    """The samples that are asked for."""

    pick: Pick = Pick.RANDOM
    steps: Steps | None = None
    """Steps of the samples; None = the newest step that has any."""
    kind: str | None = None
    part: str | None = None
    """Part of the reward that ranks in place of the whole; samples without it do not fit."""
    finish: str | None = None
    actor: str | None = None
    """Beginning of the actor's incarnation."""
    environment: str | None = None

    def fits(self, line: SampleLine) -> bool:
        """Whether a sample may be shown."""
        return (
            (self.steps is None or self.steps.first <= line.step <= self.steps.last)
            and (self.kind is None or line.kind == self.kind)
            and (self.part is None or self.part in line.parts)
            and (self.finish is None or line.finish == self.finish)
            and (self.actor is None or line.actor.startswith(self.actor))
            and (self.environment is None or line.environment == self.environment)
        )

    @property
    def is_ranked(self) -> bool:
        """Whether the query asks for the best or the worst samples."""
        return self.pick is not Pick.RANDOM

    def score(self, line: SampleLine) -> float:
        """Return the figure that ranks a sample."""
        return line.reward if self.part is None else line.parts[self.part]


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """Samples to show, and how many there were to choose from."""

    samples: list[SampleLine]
    fitting: int


def parse_steps(text: str | None) -> Steps | None:
    """Read `50`, `20..60`, `20..`, `..60`, `all`, or `newest`.

    Raises:
        SettingsError: The text is none of them.

    Example:
        >>> parse_steps("20..60")
        Steps(first=20, last=60)
    """
    if text in (None, "newest"):
        return None
    if text == "all":
        return Steps(0, 2**53)
    first, dots, last = str(text).partition("..")
    ends = [first or "0", last or str(2**53)] if dots else [first, first]
    if not all(end.isdecimal() for end in ends):
        raise SettingsError(
            f"--step must be a step, a range or a word, got {text!r}; write 50, 20..60, all or "
            f"newest"
        )
    return Steps(int(ends[0]), int(ends[1]))


def choose(lines: Lines, query: Query, *, n: int | None, random: Random) -> SampleSelection:
    """Choose among the samples that fit; `best` and `worst` mean those that were trained.

    Args:
        lines: Reads the samples of the run.
        query: The samples that are asked for.
        n: Most samples; None = all of them, in their order.
        random: Source of the draws.

    Raises:
        SettingsError: No sample fits; the text names what there is.
    """
    rank = _rank(query, random)
    held: list[tuple[float, SampleLine]] = []
    fitting, newest = 0, -1
    for line in lines():
        if not query.fits(line):
            continue
        if query.is_ranked and query.kind is None and line.kind == TRAIN:
            # Greedy answers are not ranked among sampled ones: most of the best would be greedy.
            query, fitting, newest = replace(query, kind=TRAIN), 0, -1
            held.clear()
        if query.steps is None and line.step != newest:
            if line.step < newest:
                continue
            newest, fitting = line.step, 0
            held.clear()
        fitting += 1
        held.append((rank(line), line))
        if n is not None and len(held) >= 2 * n + SPARE:
            held = nlargest(n, held, key=_rank_of)
    if not held:
        raise _no_match(lines, "no sample fits")
    shown = held if n is None else nlargest(n, held, key=_rank_of)
    return SampleSelection([line for _, line in shown], fitting)


def follow(
    lines: Lines, query: Query, *, prompt: str, n: int | None, random: Random
) -> SampleSelection:
    """Choose one sample of a question for each of several steps.

    Args:
        lines: Reads the samples of the run.
        query: The samples that are asked for; an evaluation's greedy answer precedes the others.
        prompt: The question's digest, words of its prompt, or `any` for one that is there at most
            steps.
        n: Most steps, the first and the last among them; None = all.
        random: Source of the draws.

    Raises:
        SettingsError: No question fits; the text names what there is.
    """
    question = _question(lines, query, prompt)
    rank = _rank(query, random)
    by_step: dict[int, tuple[tuple[bool, float], SampleLine]] = {}
    for line in filter(query.fits, lines()):
        if line.question != question:
            continue
        place = (line.sample == 0, rank(line))
        if line.step not in by_step or place > by_step[line.step][0]:
            by_step[line.step] = place, line
    steps = sorted(by_step)
    shown = [by_step[step][1] for step in _spread(steps, n)]
    return SampleSelection(shown, len(steps))


def _question(lines: Lines, query: Query, prompt: str) -> str:
    """Find the question that is there at most steps; of several, the first."""
    steps: dict[str, set[int]] = defaultdict(set)
    for line in filter(query.fits, lines()):
        if prompt in (ANY, line.question) or prompt in line.prompt:
            steps[line.question].add(line.step)
    if not steps:
        raise _no_match(lines, f"no sample that fits has {prompt!r} in its prompt")
    return max(steps, key=lambda question: len(steps[question]))


def _spread(steps: list[int], n: int | None) -> Iterator[int]:
    """Choose steps at even distances, the last among them, and the first if there are two."""
    if n is None or len(steps) <= n:
        yield from steps
    elif n == 1:
        yield steps[-1]
    else:
        yield from (steps[at * (len(steps) - 1) // (n - 1)] for at in range(n))


def _rank(query: Query, random: Random) -> Callable[[SampleLine], float]:
    """Return a function whose largest value marks the sample to show first."""
    if not query.is_ranked:
        return lambda _: random.random()
    sign = 1 if query.pick is Pick.BEST else -1
    return lambda line: sign * query.score(line)


def _rank_of(ranked: tuple[float, SampleLine]) -> float:
    return ranked[0]


def _no_match(lines: Lines, what: str) -> SettingsError:
    """Return an error that names what there is to ask for."""
    counts_by_name: dict[str, Counter[str]] = {
        name: Counter() for name in ("kind", "part", "finish", "environment", "actor", "step")
    }
    for line in lines():
        counts_by_name["step"][str(line.step)] += 1
        counts_by_name["part"].update(line.parts)
        for name in ("kind", "finish", "environment", "actor"):
            counts_by_name[name][getattr(line, name)] += 1
    if not counts_by_name["step"]:
        return SettingsError(
            "the run must have kept samples, got none; wait for its first evaluation or batch, or "
            "set run.samples.max_mb above 0"
        )
    counts_by_name["step"] = Counter(_range_of(counts_by_name["step"]))
    there = "; ".join(
        f"{name} {', '.join(value for value, _ in counts.most_common(NAMED))}"
        for name, counts in counts_by_name.items()
        if counts
    )
    count = sum(1 for _ in lines())
    return SettingsError(f"{what} among the {count:,} kept; ask for what these have: {there}")


def _range_of(steps: Iterable[str]) -> list[str]:
    numbers = sorted(map(int, steps))
    return [f"{numbers[0]}..{numbers[-1]}"]
