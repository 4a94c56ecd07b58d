"""The newest batches of a run, and what rules need of those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from .evidence import Evidence, StoreFigures

MOST_BATCHES = 50
FIRST_BATCHES = 3


class Window:
    """Evidence of the newest batches, oldest first, and a short memory of the whole life."""

    def __init__(self) -> None:
        self._batches: deque[Evidence] = deque(maxlen=MOST_BATCHES)
        self._first: list[Evidence] = []
        self.best_reward = float("-inf")
        """Largest reward of an episode so far."""
        self.peak = (0.0, 0)
        """Largest KL so far, and its batch."""
        self.store = StoreFigures()
        """As it was last looked at, with a batch or while none came."""

    def add(self, evidence: Evidence) -> None:
        """Take the evidence of the next batch."""
        self._batches.append(evidence)
        if len(self._first) < FIRST_BATCHES:
            self._first.append(evidence)
        self.best_reward = max(self.best_reward, evidence.reward_max)
        self.peak = max(self.peak, (evidence.kl, evidence.step))
        self.store = evidence.store

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Evidence]:
        return iter(self._batches)

    def last(self, batches: int) -> Sequence[Evidence]:
        """Return the newest batches, at most so many."""
        return list(self._batches)[-batches:]

    @property
    def newest(self) -> Evidence:
        """The last batch."""
        return self._batches[-1]

    @property
    def first_entropy(self) -> float:
        """Entropy at the beginning of this life, nats."""
        return median(each.entropy for each in self._first)


def total(batches: Sequence[Evidence], of: Callable[[Evidence], float]) -> float:
    """Add a figure up."""
    return sum(of(each) for each in batches)


def middle(batches: Sequence[Evidence], of: Callable[[Evidence], float]) -> float:
    """Return the median of a figure: one odd batch does not move it."""
    return median(of(each) for each in batches)
