"""A model of a run as rates: actors start, sample and are taken away, a learner trains batches.

No packets, no episodes: tokens flow at a rate, a batch is a quantity of them, and time goes in
steps of `TICK_S`. What the learner would measure goes to `Meter` and `next_wanted`; a scheduler
looks at the answer every half minute. The same hour under a policy that knows need and trace is the
comparison.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.fleet import Meter, first_wanted, next_wanted
from configs.settings import Settings

HOUR_S = 3600.0
TICK_S = 2.0
LOOK_S = 30.0  # KEDA's usual pause between two looks
MOST = 256


@dataclass(frozen=True)
class Load:
    """What a run asks of its actors."""

    need: Callable[[float], float]
    """Time, s -> actors that make a batch exactly as fast as the learner trains it."""
    step_s: float
    lag: int
    start_s: tuple[float, float]
    """Least and most that an actor takes to start."""
    first: int
    """Actors at the beginning."""
    version_s: float


@dataclass(frozen=True)
class Market:
    """Spot capacity."""

    capacity: Callable[[float], float]
    """Time, s -> share of `MOST` that may run; those beyond it are taken away at once."""
    taken_per_hour: Callable[[float], float]
    """Time, s -> share of the actors that is taken away in an hour."""
    taken_at_s: tuple[float, ...] = ()
    """When a third of the actors is taken away at once."""


@dataclass
class Actor:
    speed: float
    """About 1."""
    busy_s: float = 0.0


@dataclass
class Fleet:
    """The actors of a scheduler."""

    load: Load
    market: Market
    chance: random.Random
    goal: int
    serving: dict[str, Actor] = field(default_factory=dict)
    starting: list[float] = field(default_factory=list)
    """When each is ready, s."""
    started: int = 0

    def serve(self, count: int) -> None:
        for _ in range(count):
            self.started += 1
            self.serving[f"actor-{self.started}"] = Actor(self.chance.uniform(0.85, 1.15))

    def tick(self, now_s: float) -> None:
        """Let actors come that are ready, and take some away."""
        waiting = [at for at in self.starting if at > now_s]
        self.serve(len(self.starting) - len(waiting))
        self.starting = waiting
        taken = self.market.taken_per_hour(now_s) * TICK_S / HOUR_S * len(self.serving)
        if self.serving and self.chance.random() < taken:
            del self.serving[self.chance.choice(list(self.serving))]
        if any(now_s - TICK_S < at_s <= now_s for at_s in self.market.taken_at_s):
            for name in self.chance.sample(list(self.serving), math.ceil(len(self.serving) / 3)):
                del self.serving[name]
        while self.size > self.room(now_s):
            self.serving.popitem() if self.serving else self.starting.pop()

    def look(self, now_s: float) -> None:
        """Start or end actors, as far as there is room."""
        goal = min(self.goal, self.room(now_s))
        while self.size > goal:
            self.starting.pop() if self.starting else self.serving.popitem()
        while self.size < goal:
            self.starting.append(now_s + self.chance.uniform(*self.load.start_s))

    def room(self, now_s: float) -> int:
        return max(1, int(self.market.capacity(now_s) * MOST))

    @property
    def size(self) -> int:
        return len(self.serving) + len(self.starting)


@dataclass
class Ring:
    """Buffer and learner, in batches."""

    load: Load
    chance: random.Random
    waiting: float = 0.0
    """Made, and not claimed."""
    trained: int = 0
    wait_s: float = 0.0
    span_s: float = 0.0
    """Of the batch under way."""
    _until: float = math.inf
    """When it is trained; `inf` = the learner waits."""
    _known: deque[tuple[float, int]] = field(default_factory=deque)
    """When actors have a version, and its batch."""
    _version: int = 0

    def room(self, now_s: float) -> float:
        """Batches that actors may still make: `lag + 1` beyond the version that they have."""
        while self._known and self._known[0][0] <= now_s:
            self._version = self._known.popleft()[1]
        under_way = self.waiting + (self._until < math.inf)
        return max(0.0, self._version + self.load.lag + 1 - self.trained - under_way)

    def tick(self, now_s: float) -> tuple[float, float] | None:
        """Train; returns the wait and the span of a batch that has just ended, s."""
        ended = None
        self.span_s += TICK_S
        if now_s >= self._until:
            self._until, self.trained = math.inf, self.trained + 1
            self._known.append((now_s + self.load.version_s, self.trained))
            # The first batch waits for the start, as in `AdvisorThread`.
            waited_s = self.wait_s if self.trained > 1 else 0.0
            ended = waited_s, self.span_s - (self.wait_s - waited_s)
            self.wait_s = self.span_s = 0.0
        if self.is_idle and self.waiting >= 1.0 - 1e-9:
            self.waiting -= 1.0
            self._until = now_s + self.load.step_s * self.chance.uniform(0.95, 1.05)
        self.wait_s += TICK_S * self.is_idle
        return ended

    @property
    def is_idle(self) -> bool:
        return self._until == math.inf


@dataclass
class Hour:
    """How an hour went."""

    wanted: list[int]
    """Each number that was wanted, in order."""
    actor_hours: float = 0.0
    """From the beginning of their start."""
    idle_s: float = 0.0
    """Of the learner after its first batch, while no actor was missing."""
    settled_s: float = 0.0
    """In which none was."""
    batches: int = 0

    @property
    def changes(self) -> int:
        return len(self.wanted) - 1


def play(
    load: Load,
    market: Market,
    settings: Settings,
    *,
    seed: int,
    knows: bool,
    lasts_s: float = HOUR_S,
) -> Hour:
    """Play an hour; with `knows` the policy sees need and trace instead of measuring."""
    chance = random.Random(seed)
    fleet, ring = Fleet(load, market, chance, goal=load.first), Ring(load, chance)
    fleet.serve(load.first)
    meter, wanted = Meter(), first_wanted(settings)
    hour = Hour([wanted.actors])
    for tick in range(int(lasts_s / TICK_S)):
        now_s = tick * TICK_S
        fleet.tick(now_s)
        if tick % int(LOOK_S / TICK_S) == 0:
            if knows:
                needs = [load.need(now_s + after_s) for after_s in (0.0, sum(load.start_s) / 2)]
                fleet.goal = min(MOST, math.ceil(max(needs)))
            fleet.look(now_s)
        _sample(fleet, ring, now_s)
        batch = ring.tick(now_s)
        if batch is not None and not knows:
            busy = {name: actor.busy_s for name, actor in fleet.serving.items()}
            meter.observe_busy_time(now_s, busy, version_s=load.version_s)
            measured = meter.batch(wait_s=batch[0], span_s=batch[1])
            if measured is not None:
                wanted = next_wanted(wanted, measured, settings, now_s=now_s)
            if wanted.actors != fleet.goal:
                hour.wanted.append(wanted.actors)
            fleet.goal = wanted.actors
        hour.actor_hours += fleet.size * TICK_S / HOUR_S
        if ring.trained and len(fleet.serving) >= fleet.goal:
            hour.settled_s += TICK_S
            hour.idle_s += TICK_S * ring.is_idle
    hour.batches = ring.trained
    return hour


def _sample(fleet: Fleet, ring: Ring, now_s: float) -> None:
    """Let actors make what there is room for; all of them work for the same share of the time."""
    speed = sum(actor.speed for actor in fleet.serving.values())
    could = TICK_S * speed / (fleet.load.need(now_s) * fleet.load.step_s)
    made = min(ring.room(now_s), could)
    ring.waiting += made
    for actor in fleet.serving.values():
        actor.busy_s += TICK_S * made / could
