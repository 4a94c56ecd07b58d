"""The number of episodes that an actor has at a time, and the share of its time that is work."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import structlog

from broker.protocol.messages import MAX_LINES
from configs.tables.actors import ActorSettings

# --------------------------------------------------------------------------------------------------
# The KV cache of an engine, as its scheduler reports it with every step.
#
# The engine's thread records, the event loop reads: each value is replaced as a whole.


class CacheMeter:
    """Records the steps of an engine; `memory` is the newest state of its cache."""

    def __init__(self) -> None:
        self.memory: KvCacheState | None = None
        """None before the first step."""
        self._evicted = 0

    def record(self, used: float, evicted: int) -> None:
        """Record the cache after a step of the engine.

        Args:
            used: Share of the cache that is in use, 0 to 1.
            evicted: Episodes that lost their cache in this step.
        """
        self._evicted += evicted
        self.memory = KvCacheState(used, self._evicted)


# --------------------------------------------------------------------------------------------------
# The number of episodes that fills an engine, found while the engine works.
#
# A hill climb over numbers that double, by tokens a second. Two numbers are compared, the present
# one and the one before it, whichever is the greater:
#
#   the greater made 3 % more                      ->  the greater, else the fewer
#   the cache has room, nothing above was measured ->  up to twice as many, as far as the room goes
#   many episodes lost their KV cache to others    ->  a fifth fewer, unless measured already
#
# A step up is taken after one window, a step down after three, and either is taken back as soon as
# later windows contradict it: a machine is quicker in one minute than in the next. After five
# minutes a number that was left may be tried again. Additive steps would take hours from 8 to 512.
# Pure: the caller measures, and has the clock.

WINDOW_S = 10.0
FULL = (
    0.75  # share of a window's looks at which the actor is full; with less it had too little work
)
USED = 0.97  # of the KV cache: episodes grow after they have begun
EVICTED, FEW = 0.1, 2  # times for each episode that ends: below it the cache is well filled
FEWER = 0.8
GAIN = 1.03  # of tokens a second, for the greater of two numbers
DOWN_AFTER = 3  # windows at a number: the first, with the prefills, is out of the mean by then
LATEST = 6  # windows that a speed is the mean of: a minute
HELD_S = 300.0  # that a number which was left is compared with


@dataclass(frozen=True, slots=True)
class KvCacheState:
    """An engine's KV cache. Producer: the engine's thread."""

    used: float
    """Share, 0 to 1."""
    evicted: int
    """Times since the start that a running episode lost its cache to others and was begun anew."""


@dataclass(slots=True)
class _Window:
    """Counts at the beginning of an interval of measurement, and what was seen since."""

    began_s: float
    tokens: int
    ended: int
    evicted: int
    looks: int = 0
    full: int = 0
    used: float = 0.0
    """Largest share of the cache that was in use."""


@dataclass(slots=True)
class _Speed:
    """Speed of the engine with one number of episodes."""

    number: int
    windows: int = 0
    tokens_per_s: float = 0.0
    """Mean of the latest windows; the first one counts until the second has ended."""

    def add(self, tokens_per_s: float) -> None:
        """Add the speed of a window to the mean."""
        self.windows += 1
        share = 1 / min(max(self.windows - 1, 1), LATEST)
        self.tokens_per_s += share * (tokens_per_s - self.tokens_per_s)


@dataclass
class BatchSize:
    """Chooses the number of episodes from what `update_number` is told.

    Args:
        least: Least number, with which it begins.
        most: Greatest number.
    """

    least: int
    most: int
    reason: str = "nothing is measured yet"
    """Reason of the last change."""
    _window: _Window | None = None
    _speed: _Speed = field(init=False)
    _other: _Speed | None = None
    """The number before the last change, and its speed."""
    _other_until_s: float = -math.inf

    def __post_init__(self) -> None:
        self._speed = _Speed(self.least)

    @property
    def number(self) -> int:
        """Number of episodes at a time."""
        return self._speed.number

    def update_number(
        self,
        now_s: float,
        *,
        tokens: int,
        ended: int,
        is_full: bool,
        is_over: bool,
        memory: KvCacheState,
    ) -> bool:
        """Measure, and return whether `number` has changed.

        Args:
            now_s: Time of any monotonic clock.
            tokens: Tokens sampled since the start.
            ended: Episodes with all their tokens, since the start.
            is_full: There is no room for another episode.
            is_over: More than `number` episodes still run, since it was lowered: nothing is
                measured.
            memory: KV cache of the engine.
        """
        window = self._window
        if window is None or is_over:
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
        is_measured = window.full >= FULL * window.looks
        tokens_per_s = (tokens - window.tokens) / span_s if is_measured else 0.0
        if is_measured:
            self._speed.add(tokens_per_s)
        if now_s >= self._other_until_s:
            self._other = None
        evicted = memory.evicted - window.evicted
        if evicted > EVICTED * (ended - window.ended) + FEW and self._can_try_fewer():
            self._speed.tokens_per_s = tokens_per_s  # its episodes may have been shorter before
            reason = f"{evicted} episodes lost their KV cache in {WINDOW_S:.0f} s"
            self._change(now_s, self._reduced_number(), reason)
        elif is_measured:
            self._compare_speeds(now_s, window.used)
        return self.number != before

    def _compare_speeds(self, now_s: float, used: float) -> None:
        """Change the number at the end of a full window, if its speed says so."""
        speed, other = self._speed, self._other
        if other is not None:
            fewer, more = sorted((speed, other), key=attrgetter("number"))
            is_faster = more.tokens_per_s >= GAIN * fewer.tokens_per_s
            if speed is fewer:
                if is_faster:
                    self._change(now_s, more.number, f"{fewer.number} made fewer tokens")
                return
            if not is_faster:
                if speed.windows >= DOWN_AFTER:
                    self._change(now_s, fewer.number, f"{more.number} made no more tokens")
                return
        goal = min(self.most, round(self.number * min(2.0, USED / max(used, 0.01))))
        if goal >= GAIN * self.number:
            self._change(now_s, goal, f"{used:.0%} of the KV cache is in use")

    def _reduced_number(self) -> int:
        return max(self.least, int(self.number * FEWER))

    def _can_try_fewer(self) -> bool:
        is_known = (
            self._other is not None and self._reduced_number() <= self._other.number < self.number
        )
        return self._reduced_number() < self.number and not is_known

    def _change(self, now_s: float, number: int, reason: str) -> None:
        self._other, self._other_until_s = self._speed, now_s + HELD_S
        self._speed, self.reason = _Speed(number), reason


# --------------------------------------------------------------------------------------------------
# The number of episodes that an actor may have at a time.


def leases_for(slots: int, in_flight: int | None = None) -> int:
    """Return how many leases keep so many places of an engine full, at most `MAX_LINES`.

    A few episodes wait for a place, so that a free one is taken in the very next step.

    Args:
        slots: Places of the engine.
        in_flight: Number of leases that a person has set; None = a sixteenth more than places.
    """
    return min(MAX_LINES, in_flight or slots + slots // 16)


class ConcurrencyLimit:
    """A bound on episodes, generated or waiting for their environment; it may change.

    Args:
        most: The bound.
        group_size: Episodes of a group of the run.
    """

    def __init__(self, most: int, *, group_size: int) -> None:
        self.most = most
        self.group_size = group_size
        self._changed = asyncio.Event()

    @property
    def full_from(self) -> int:
        """Number of episodes from which on no leases are requested.

        Whole groups are leased together where they fit, and share their prompt in the prefix cache.
        """
        return self.most - max(1, min(self.group_size, self.most // 4)) + 1

    def resize(self, most: int) -> None:
        """Change the bound; episodes beyond it go on."""
        self.most = most
        self._changed.set()

    async def other_than(self, most: int) -> None:
        """Wait until the bound differs from this one."""
        while self.most == most:
            self._changed.clear()
            await self._changed.wait()


# --------------------------------------------------------------------------------------------------
# Keeping an actor's room at the number of episodes that fills its engine.
#
# Measures once a second; `BatchSize` decides.

LOOK_S = 1.0

log = structlog.get_logger()


class ActorCounts(NamedTuple):
    """Counts of an actor at one moment."""

    tokens: int
    """Tokens sampled since its start."""
    episodes: int
    """Episodes begun and not finished."""
    ended: int
    """Episodes with all their tokens, since its start."""


class Tuner:
    """Changes the bound on an actor's episodes by its speed and its engine's cache.

    Args:
        room: The bound; it is set to the least number at once.
        actors: Settings, with the bounds of the number.
        meter: State of the engine's KV cache.
    """

    def __init__(self, room: ConcurrencyLimit, actors: ActorSettings, meter: CacheMeter) -> None:
        self._room, self._meter = room, meter
        self._size = BatchSize(actors.least_concurrent_episodes, actors.most_concurrent_episodes)
        room.resize(leases_for(self._size.number))

    @property
    def reason(self) -> str:
        """Reason of the last change."""
        return self._size.reason

    async def run(self, read_counts: Callable[[], ActorCounts]) -> None:
        """Tune the room once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.tune_room(time.monotonic(), read_counts())

    def tune_room(self, now_s: float, counts: ActorCounts) -> None:
        """Measure once; resize the room if the best number has changed.

        Nothing happens before the first step of the engine.
        """
        size, memory = self._size, self._meter.memory
        if memory is None:
            return
        has_changed = size.update_number(
            now_s,
            tokens=counts.tokens,
            ended=counts.ended,
            is_full=counts.episodes >= self._room.full_from,
            is_over=counts.episodes > self._room.most,
            memory=memory,
        )
        if has_changed:
            log.info("episodes at a time", number=size.number, reason=size.reason)
            self._room.resize(leases_for(size.number))


# --------------------------------------------------------------------------------------------------
# The time that an actor works, out of the tokens that its engine makes.
#
#     work = time without room for another episode
#            + tokens made in the rest of the time / most tokens a second
#
# An engine with one episode is busy, and may still be far from its greatest speed: on a GPU twice
# as many episodes make almost twice as many tokens, on a CPU hardly more. So the greatest speed is
# learned from the engine itself, by its tokens a second at each number of episodes. Pure.

ENOUGH_S = 30.0
"""Time with a number of episodes after which its speed counts."""
HALF_LIFE_S = 600.0  # of measurements: answers grow longer in training, and engines slower


class WorkEstimator:
    """Estimates for each interval how much of it was work, for the heartbeats' figures."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Time by the number of episodes, in powers of two."""
        self._tokens: dict[int, float] = {}

    def add(self, passed_s: float, tokens: int, *, episodes: int, is_full: bool) -> float:
        """Take an interval, and return how much of it was work, seconds.

        An interval with episodes is all work until the greatest speed is known.

        Args:
            passed_s: Length of the interval.
            tokens: Tokens sampled in it.
            episodes: Episodes that the engine has at its end.
            is_full: There is no room for another episode.
        """
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        for seen in (self._seconds, self._tokens):
            for number in seen:
                seen[number] *= kept
        number = episodes.bit_length()
        self._seconds[number] = self._seconds.get(number, 0.0) + passed_s
        self._tokens[number] = self._tokens.get(number, 0.0) + tokens
        best = self._best_speed()
        if is_full or best is None:
            return passed_s if is_full or episodes else 0.0
        return min(tokens / best, passed_s)  # the best so far may have been a slow minute's

    def _best_speed(self) -> float | None:
        """Return tokens a second at the best number; None before there are enough measurements."""
        speeds = [
            self._tokens[number] / seconds
            for number, seconds in self._seconds.items()
            if seconds >= ENOUGH_S and self._tokens[number]
        ]
        return max(speeds, default=None)
