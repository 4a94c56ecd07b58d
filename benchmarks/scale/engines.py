"""Engines of the simulated fleet: sequences that run beside each other slow each other down."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from benchmarks.scale.workload import Workload


@dataclass(slots=True)
class Episode:
    """An episode under way."""

    task_id: int
    fence: int
    tokens: int
    """Of the whole completion."""
    oldest: int
    """Version of its first token."""
    done: int = 0
    """Tokens that it began this lease with."""


@dataclass(slots=True)
class Engine:
    """One actor: its episodes, and a clock that counts the tokens of each of them.

    All sequences of an engine are at the same speed, so one number says how far each is: the tokens
    that a sequence has made which ran since the beginning.
    """

    workload: Workload
    name: str
    version: int = 0
    clock: float = 0.0
    """Tokens, up to `at`."""
    at: float = 0.0
    busy_s: float = 0.0
    place_s: float = 0.0
    """Seconds of all places that were in use."""
    heap: list[tuple[float, int, Episode]] = field(default_factory=list)
    """By the clock at which each ends."""
    is_alive: bool = True
    visit: int = 0
    """Number of its latest next event; earlier ones are void."""

    @property
    def free(self) -> int:
        """Places without a sequence."""
        return self.workload.capacity - len(self.heap)

    def advance(self, now: float) -> None:
        """Let time pass."""
        running, passed = len(self.heap), now - self.at
        if running:
            self.clock += passed * self.workload.tokens_per_s(running)
            self.busy_s += passed
            self.place_s += passed * running
        self.at = now

    def start(self, episode: Episode) -> None:
        """Begin or resume an episode; `advance` comes first."""
        ends = self.clock + episode.tokens - episode.done
        heapq.heappush(self.heap, (ends, episode.task_id, episode))

    def next_end(self) -> float | None:
        """When the next episode ends, if nothing else begins."""
        if not self.heap:
            return None
        left = max(0.0, self.heap[0][0] - self.clock)
        return self.at + left / self.workload.tokens_per_s(len(self.heap))

    def finished(self) -> list[Episode]:
        """Take out what has ended by now."""
        ended: list[Episode] = []
        while self.heap and self.heap[0][0] <= self.clock + 1e-6:
            ended.append(heapq.heappop(self.heap)[2])
        return ended

    def stop(self, unsaved_tokens: float) -> list[Episode]:
        """End at once; returns its episodes with the tokens that had been handed over."""
        left = [(ends, episode) for ends, _, episode in self.heap]
        self.heap.clear()
        self.is_alive = False
        for ends, episode in left:
            made = episode.tokens - (ends - self.clock)
            episode.done = max(episode.done, int(made - unsaved_tokens))
        return [episode for _, episode in left]
