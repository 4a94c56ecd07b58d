"""Engines by formula, with a limit of memory or of speed, on machines that are not steady.

The real one is in `benchmarks/batch_size.py`, where one search takes minutes; here hundreds of them
take a second.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from actors.capacity import BatchSize, KvCacheState

LOOK_S = 1.0
LIFE_S = 30.0  # of an episode
QUICK_S, SLOW_S = 5.0, 120.0
"""After these a machine has forgotten most of how fast it was."""


class Machine:
    """A speed that wanders by `spread` around 1, within windows and over minutes."""

    def __init__(self, spread: float, seed: int) -> None:
        self._spread, self._chance = spread, random.Random(seed)
        self._logs = {QUICK_S: 0.0, SLOW_S: self._chance.gauss(0, spread)}

    def next(self) -> float:
        """Of the next second."""
        for forgets_s in self._logs:
            kept = math.exp(-LOOK_S / forgets_s)
            step = self._spread * math.sqrt(1 - kept**2)
            self._logs[forgets_s] = kept * self._logs[forgets_s] + self._chance.gauss(0, step)
        return math.exp(sum(self._logs.values()))

    def wander(self, spread: float) -> float:
        """Draw a number around 1."""
        return 1 + self._chance.gauss(0, spread)


@dataclass
class StandInEngine:
    """Makes tokens by its number of episodes, each of which needs a part of the memory.

    Beyond the memory episodes are evicted, and what they had is made again.
    """

    speed: Callable[[int], float]
    fits: int
    kept: float = 0.67
    """Share of the speed that is left where episodes are evicted."""
    lengths: float = 0.0
    """Spread of the memory that the episodes of a moment need."""
    machine: Machine = field(default_factory=lambda: Machine(0.0, 0))
    now_s: float = 0.0
    tokens: float = 0.0
    evicted: int = 0
    ended: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def rate(self, number: int) -> float:
        return self.speed(min(number, self.fits)) * (1.0 if number <= self.fits else self.kept)

    def run(self, size: BatchSize, seconds: float, *, is_full: bool = True) -> None:
        for _ in range(int(seconds / LOOK_S)):
            needed = size.number * self.machine.wander(self.lengths)
            self.now_s += LOOK_S
            self.tokens += LOOK_S * self.rate(size.number) * self.machine.next()
            self.evicted += max(0, math.ceil(needed - self.fits))
            self.ended += LOOK_S * size.number / LIFE_S
            before = size.number
            has_changed = size.update_number(
                self.now_s,
                tokens=int(self.tokens),
                ended=int(self.ended),
                is_full=is_full,
                is_over=False,
                memory=KvCacheState(min(1.0, needed / self.fits), self.evicted),
            )
            assert has_changed is (size.number != before)
            self.numbers.append(size.number)

    def best(self, size: BatchSize) -> float:
        return max(map(self.rate, range(size.least, size.most + 1)))


def on_a_gpu(number: int) -> float:
    """Step time a + b x: almost twice the tokens from twice the episodes, at first."""
    return 1000 * number / (20 + 0.05 * number)


def on_a_cpu(number: int) -> float:
    """Beyond sixteen hardly more."""
    return 40.0 * min(number, 16) + 0.01 * number


def by_memory(number: int) -> float:
    """Twice the tokens from twice the episodes."""
    return 50.0 * number


def peaked(number: int) -> float:
    """Most at 60, where beyond it caches of the processor overflow."""
    return 10_000 * number / 60 * math.exp(1 - number / 60)


def swept(number: int) -> float:
    """As `benchmarks/batch_size.py` measured it, in its turns: 32 make 0.81 of 128."""
    points = ((0, 0), (8, 4175), (16, 6663), (32, 8300), (48, 9893), (64, 9936), (128, 10219))
    for (low, less), (high, more) in pairwise(points):
        if number <= high:
            return less + (more - less) * (number - low) / (high - low)
    return points[-1][1]
