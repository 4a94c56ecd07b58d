"""The number of episodes that fills an engine, found while it works.

Looks are gathered into windows; a window without room for another episode decides:

    many episodes lost their KV cache to others    ->  a fifth fewer, and for a while no more
    less was made than before the last step up     ->  back to before, and for a while no more
    the cache has room                             ->  up to twice as many, as far as the room goes

Additive steps would take hours from 8 to 512; halving at each preemption would waste half of a
cache that a few episodes have outgrown. Pure: the caller looks, and has the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW_S = 10.0
FULL = 0.75  # share of a window's looks: with fewer, the run gave this actor too little to judge by
USED = 0.95  # of the KV cache: episodes grow after they have begun
EVICTED, FEW = 0.1, 2  # times for each episode that ends: below it the cache is well filled
FEWER = 0.8
GAIN = 1.03  # of tokens a second, for a step up to be kept
JUDGED_AFTER = 2  # windows at a new number: the first has its prefills
HELD_S = 300.0  # at a number from which a step up has failed


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine's KV cache. Producer: the engine's thread."""

    used: float
    """Share, 0 to 1."""
    evicted: int
    """Times since the start that a running episode lost its cache to others and was begun anew."""


@dataclass(slots=True)
class _Window:
    began_s: float
    tokens: int
    ended: int
    evicted: int
    looks: int = 0
    full: int = 0
    used: float = 0.0
    """Most."""


@dataclass(slots=True)
class _Speed:
    """Tokens a second at one number, over whole windows."""

    tokens: int = 0
    seconds: float = 0.0
    windows: int = 0

    def mean(self) -> float:
        """Of one window at least."""
        return self.tokens / self.seconds


@dataclass
class BatchSize:
    """Looks in; a number out.

    Args:
        least: Of it, which it begins with.
        most: Of it.
    """

    least: int
    most: int
    number: int = field(init=False)
    reason: str = "nothing is measured yet"
    """Of the last change."""
    _window: _Window | None = None
    _speed: _Speed = field(default_factory=_Speed)
    _below: tuple[int, float] | None = None
    """The number before the last step up, and its tokens a second."""
    _held_until_s: float = -math.inf

    def __post_init__(self) -> None:
        self.number = self.least

    def look(self, now_s: float, *, tokens: int, ended: int, is_full: bool, memory: Memory) -> bool:
        """Take a look; returns whether `number` has changed.

        Args:
            now_s: Of any clock.
            tokens: Made since the start.
            ended: Episodes with all their tokens, since the start.
            is_full: There is no room for another episode.
            memory: Of the engine.
        """
        window = self._window
        if window is None:
            self._window = _Window(now_s, tokens, ended, memory.evicted)
            return False
        window.looks += 1
        window.full += is_full
        window.used = max(window.used, memory.used)
        span_s = now_s - window.began_s
        if span_s < WINDOW_S:
            return False
        self._window = _Window(now_s, tokens, ended, memory.evicted)
        before = self.number
        evicted = memory.evicted - window.evicted
        if evicted > EVICTED * (ended - window.ended) + FEW:
            self._retreat(now_s, evicted)
        elif window.full >= FULL * window.looks:
            self._speed.tokens += tokens - window.tokens
            self._speed.seconds += span_s
            self._speed.windows += 1
            self._judge(now_s, window.used)
        return self.number != before

    def _retreat(self, now_s: float, evicted: int) -> None:
        reason = f"{evicted} episodes lost their KV cache in {WINDOW_S:.0f} s"
        self._set(max(self.least, int(self.number * FEWER)), reason)
        self._below, self._held_until_s = None, now_s + HELD_S

    def _judge(self, now_s: float, used: float) -> None:
        """Go back or on, at the end of a window without room."""
        if self._below is not None:
            number, speed = self._below
            is_faster = self._speed.mean() >= GAIN * speed
            if not is_faster and self._speed.windows < JUDGED_AFTER:
                return
            self._below = None
            if not is_faster:
                self._held_until_s = now_s + HELD_S
                self._set(number, f"{self.number} made no more tokens")
        room = USED / max(used, 0.01)
        goal = min(self.most, round(self.number * min(2.0, room)))
        if goal > self.number and now_s >= self._held_until_s:
            self._below = self.number, self._speed.mean()
            self._set(goal, f"{used:.0%} of the KV cache is in use")

    def _set(self, number: int, reason: str) -> None:
        if number != self.number:
            self.number, self.reason, self._speed = number, reason, _Speed()
