"""The size of a fleet of actors: how many a run wants, and what they cost.

The learner measures and decides after each batch. The broker's `/metrics` shows the number to
whatever starts actors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.tables.actors import FleetSettings
from configs.tables.all_tables import AllTables
from configs.validation.store import max_units_in_flight

# --------------------------------------------------------------------------------------------------
# The cost of a run's actors, and the end of its budget.


def cost(fleet: FleetSettings, actor_s: float) -> float | None:
    """Return what so many seconds of actors cost; None without a price."""
    price = fleet.price_per_actor_hour
    return None if price is None else price * actor_s / 3600


def overspent(fleet: FleetSettings, actor_s: float) -> str | None:
    """Explain that `fleet.max_total` is spent; None while there is budget left."""
    spent = cost(fleet, actor_s)
    if spent is None or fleet.max_total is None or spent < fleet.max_total:
        return None
    return (
        f"fleet.max_total must be above what the run's actors have cost, {spent:.2f}, to train on, "
        f"got {fleet.max_total:g}; raise it, and the same command goes on from the checkpoint"
    )


# --------------------------------------------------------------------------------------------------
# The number of actors that a run wants: enough that its learner hardly waits, and no more.
#
#   wanted = actors x their busy share x (time of a batch / time that a batch could take) + a tenth
#
# Actors that never rest while the learner waits for a third of the time are two thirds of those
# that are needed; actors that rest for half of it while the learner never waits are twice as many.
# Pure: the caller measures, keeps the number of before, and has the clock.

SPARE = 1.1  # episodes differ in length and actors come and go: without any, every gap is a wait
IDLE = 0.03  # of the learner's time: no reason to want another actor
MORE_AFTER_S = 120.0  # since the last change: what is measured then is not the start of actors
FEWER_AFTER_S = 600.0  # an actor that ends too early costs its start, and the learner's time
FEWER = 0.85  # of the present number: above it the difference is not worth a change
MOST_AT_ONCE = 16.0  # times as many: what a clock that jumped may cost for two minutes


@dataclass(frozen=True, slots=True)
class FleetMeasurements:
    """Measurements over the last minutes of a run. Producer: the learner."""

    actors: float
    """Mean number of those that had weights."""
    busy: float
    """Share of their time in which they could not have done more."""
    idle: float
    """Share of the learner's time in which it waited for episodes."""
    step_s: float
    """Time of a batch without the wait for its episodes."""
    version_s: float = 0.0
    """From the announcement of a version until the slowest actor samples from it."""


@dataclass(frozen=True, slots=True)
class WantedActors:
    """The number of actors that the run wants. Consumers: metrics, displays, what starts actors."""

    actors: int
    reason: str
    since_s: float = -math.inf
    """When the number changed last, by the caller's clock."""


def first_wanted(settings: AllTables) -> WantedActors:
    """Return the number of actors before anything is measured."""
    least = settings.fleet.min_actors
    name = "fleet.min_actors" if settings.actors.count < least else "actors.count"
    return _bounded(max(least, settings.actors.count), f"nothing is measured yet: {name}", settings)


def next_wanted(
    before: WantedActors, measured: FleetMeasurements, settings: AllTables, *, now_s: float
) -> WantedActors:
    """Return the number of actors wanted after a batch; mostly it stays as it was.

    Args:
        before: Result of the last call.
        measured: Measurements since then, or over some minutes.
        settings: Settings of the run; `fleet` and the bound on policy lag count.
        now_s: Time by any one clock, seconds.
    """
    longest_lag = settings.run.max_policy_lag + 1
    least_s = max(measured.step_s, measured.version_s / longest_lag)
    span_s = measured.step_s / (1.0 - min(measured.idle, 0.99))
    needed = actors_to_feed(measured.actors * measured.busy, span_s=span_s, least_s=least_s)
    why = f"learner idle {measured.idle:.0%}, actors busy {measured.busy:.0%}"
    if least_s > measured.step_s:
        why += f", a version takes {measured.version_s:.0f} s to be everywhere"
    goal = _bounded(needed, why, settings)
    is_starved = goal.actors > before.actors and measured.idle > IDLE
    is_beyond = _bounded(before.actors, why, settings).actors != before.actors
    is_ample = goal.actors <= FEWER * before.actors
    held_s = now_s - before.since_s
    is_more = is_starved and held_s >= MORE_AFTER_S
    is_fewer = is_ample and held_s >= FEWER_AFTER_S
    if is_beyond or is_more or is_fewer:
        return WantedActors(goal.actors, goal.reason, now_s)
    kept = goal.reason if goal.actors == before.actors else why
    return WantedActors(before.actors, kept, before.since_s)


def actors_to_feed(actors: float, *, span_s: float, least_s: float) -> int:
    """Return how many actors make a batch in `least_s`, where `actors` take `span_s`.

    Args:
        actors: Actors that work all of the time.
        span_s: Time from batch to batch now.
        least_s: Shortest possible: what the learner needs.
    """
    times = min(span_s / least_s, MOST_AT_ONCE) if least_s > 0 else MOST_AT_ONCE
    needed = actors * times
    return max(1, math.ceil(needed * (1 - IDLE)), math.floor(needed * SPARE + 0.5))


def affordable_actors(fleet: FleetSettings) -> int | None:
    """Return how many actors `fleet.max_per_hour` pays for; None without such a bound."""
    if fleet.max_per_hour is None or fleet.price_per_actor_hour is None:
        return None
    return int(fleet.max_per_hour / fleet.price_per_actor_hour + 1e-9)


def bounds_on_actors(settings: AllTables) -> list[tuple[int, str]]:
    """Return the most actors that a run can use or have, each with the setting that says so."""
    fleet, run = settings.fleet, settings.run
    limit = "broker.max_actors" if fleet.max_actors is None else "fleet.max_actors"
    most = fleet.max_actors or settings.broker.max_actors
    tasks = max_units_in_flight(run, settings.buffer) * run.group_size
    bounds = [
        (tasks, f"run.max_policy_lag {run.max_policy_lag} admits {tasks} episodes at a time"),
        (most, f"{limit} {most}"),
    ]
    if (affordable := affordable_actors(fleet)) is not None:
        bounds.append((affordable, f"fleet.max_per_hour {fleet.max_per_hour}"))
    return bounds


def _bounded(actors: int, why: str, settings: AllTables) -> WantedActors:
    """Keep a number within all bounds; the reason names the one that it met."""
    fleet = settings.fleet
    for bound, name in bounds_on_actors(settings):
        if actors > bound:
            actors, why = bound, f"{why}; {actors} but for {name}"
    if actors < fleet.min_actors:
        actors, why = fleet.min_actors, f"{why}; {actors} but for fleet.min_actors"
    return WantedActors(actors, why)


# --------------------------------------------------------------------------------------------------
# Measuring a fleet: looks at its actors and times of batches become what is decided by.
#
# Pure, with the caller's clock. Keeps as many batches as fill `WINDOW_S`, and three at least.

WINDOW_S = 120.0
FEWEST_BATCHES = 3


@dataclass(slots=True)
class _BatchInterval:
    """Times since the batch before: of the learner, and as observed, of actors; all in seconds."""

    span_s: float = field(init=False)
    wait_s: float = field(init=False)
    looked_s: float = 0.0
    """Time between looks."""
    actor_s: float = 0.0
    """Time of all actors, between looks."""
    known_s: float = 0.0
    """Time of the actors that were present at both looks."""
    busy_s: float = 0.0
    """Part of `known_s` in which they were busy."""


class Meter:
    """Averages looks at actors and batches over the last minutes."""

    def __init__(self) -> None:
        self._window: deque[_BatchInterval] = deque()
        self._now = _BatchInterval()
        self._looked_at: float | None = None
        self._busy: Mapping[str, float] = {}
        self._version_s: float  # of the last look, without which nothing is measured

    def observe_busy_time(
        self, now_s: float, busy: Mapping[str, float], *, version_s: float = 0.0
    ) -> None:
        """Take the actors of one moment.

        Args:
            now_s: Time by the caller's clock.
            busy: Actor with weights -> seconds of work since its start.
            version_s: Until the newest version was everywhere.
        """
        stretch = self._now
        if self._looked_at is not None:
            passed_s = now_s - self._looked_at
            both = busy.keys() & self._busy.keys()
            stretch.looked_s += passed_s
            stretch.actor_s += passed_s * (len(busy) + len(self._busy)) / 2
            stretch.known_s += passed_s * len(both)
            stretch.busy_s += sum(
                min(passed_s, max(0.0, busy[name] - self._busy[name])) for name in both
            )
        self._looked_at, self._busy, self._version_s = now_s, dict(busy), version_s

    def batch(self, *, wait_s: float, span_s: float) -> FleetMeasurements | None:
        """Take a batch, and measure; None as long as too little is known.

        Args:
            wait_s: Time of waiting for the batch's episodes.
            span_s: Since the batch before, the wait included.
        """
        window, stretch = self._window, self._now
        stretch.wait_s, stretch.span_s = wait_s, span_s
        window.append(stretch)
        self._now = _BatchInterval()
        while len(window) > FEWEST_BATCHES and self._total("span_s") - window[0].span_s > WINDOW_S:
            window.popleft()
        span_s, looked_s, known_s = map(self._total, ("span_s", "looked_s", "known_s"))
        if not span_s or not looked_s or not known_s:
            return None
        wait_s = self._total("wait_s")
        return FleetMeasurements(
            actors=self._total("actor_s") / looked_s,
            busy=self._total("busy_s") / known_s,
            idle=wait_s / span_s,
            step_s=(span_s - wait_s) / len(window),
            version_s=self._version_s,
        )

    def _total(self, name: str) -> float:
        return sum(float(getattr(stretch, name)) for stretch in self._window)
