"""Pairs of faults: which two, in which order and how far apart, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

from console.display.json_lines import number, read_rows

from .fault import Fault
from .faults import clock_jumps, failover, network, processes, stores
from .pair_case import inject_both

NUM_PAIRS = 40
APART_S = 0.6  # `nyala up` starts a dead process again after half a second
KINDS: tuple[tuple[str, ...], ...] = (
    ("actor-kill", "actors-kill-all"),
    ("broker-kill",),
    ("redis-rewind",),
    ("redis-failover",),
    ("learner-kill-saving",),
    ("redis-disk-full", "checkpoint-disk-full"),
    ("clock-forwards", "clock-backwards"),
    ("net-half-open",),
)
"""Kinds of faults; the variants of one kind take turns."""
IMPOSSIBLE = (
    {"redis-rewind", "redis-failover"},  # both exchange the log of the same dead server
    {"redis-disk-full", "redis-failover"},  # a replica's files need room
    # Both wait for the same moment of the same process.
    {"checkpoint-disk-full", "learner-kill-saving"},
)
OVERRIDES = ("run.max_policy_lag=64", "actors.max_concurrent_episodes=32")
"""More episodes to meet half done. A bound of a few batches would drop them while a lease expires,
and a resumed episode that is not trained shows nothing."""
PREPARED_LAST = ("actor-kill", "actors-kill-all", "learner-kill-saving")
"""They stop their victim in a state that passes, the last of them for the shortest time."""

_FAULTS = {
    fault.name: fault
    for module in (processes, stores, failover, network, clock_jumps)
    for fault in module.FAULTS
}


def draw_pairs(seed: int, count: int = NUM_PAIRS) -> tuple[Fault, ...]:
    """Draw pairs: each two kinds once in random order, then again with other variants."""
    draw = random.Random(seed)
    kinds = [pair for pair in combinations(KINDS, 2) if _choices(*pair)]
    pairs: list[Fault] = []
    for turn in range(count):
        if turn % len(kinds) == 0:
            draw.shuffle(kinds)
        choices = _choices(*kinds[turn % len(kinds)])
        names = choices[(turn // len(kinds)) % len(choices)]
        pairs.append(_pair(names, turn + 1, draw.uniform(-APART_S, APART_S)))
    return tuple(pairs)


def resumed_episodes(folder: Path) -> int:
    """Count trained episodes that another actor had begun, over all runs in a folder."""
    rows = [row for file in folder.glob("*/metrics.jsonl") for row in read_rows(file)]
    return int(sum(number(row, "resumed_episodes") for row in rows))


def _choices(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """Return which variants of two kinds go together."""
    pairs = [(a, b) for a in one for b in other]
    return [pair for pair in pairs if set(pair) not in IMPOSSIBLE]


def _pair(names: tuple[str, str], number_of: int, delay_s: float) -> Fault:
    """Make one fault of two."""
    first, second = sorted(names, key=_rank)
    faults = (_FAULTS[first], _FAULTS[second])
    obstacles = [fault.obstacle for fault in faults]
    return Fault(
        f"{number_of:02}.{first}.{second}",
        f"{faults[0].what}, and {faults[1].what}",
        partial(inject_both, first=faults[0], second=faults[1], delay_s=delay_s),
        lambda: next(filter(None, (obstacle() for obstacle in obstacles)), None),
        # One that all pairs share, so that they can follow each other on one run.
        None if clock_jumps.obstacle() else clock_jumps.shiftable,
        OVERRIDES,
    )


def _rank(name: str) -> int:
    return PREPARED_LAST.index(name) if name in PREPARED_LAST else -1
