"""The number of actors that a run wants: enough that its learner hardly waits, and no more.

    wanted = actors x their busy share x (time of a batch / time that a batch could take) + a tenth

Actors that never rest while the learner waits for a third of the time are two thirds of those that
are needed; actors that rest for half of it while the learner never waits are twice as many. Pure:
the caller measures, keeps the number of before, and has the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.tables.actors import FleetSettings
from configs.tables.all_tables import AllTables
from configs.validation.store import max_units_in_flight

SPARE = 1.1  # episodes differ in length and actors come and go: without any, every gap is a wait
IDLE = 0.03  # of the learner's time: no reason to want another actor
MORE_AFTER_S = 120.0  # since the last change: what is measured then is not the start of actors
FEWER_AFTER_S = 600.0  # an actor that ends too early costs its start, and the learner's time
FEWER = 0.85  # of the present number: above it the difference is not worth a change
MOST_AT_ONCE = 16.0  # times as many: what a clock that jumped may cost for two minutes


@dataclass(frozen=True, slots=True)
class Measured:
    """A run over its last minutes. Producer: the learner."""

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
class Wanted:
    """A number of actors. Consumers: metrics, displays, whoever starts actors."""

    actors: int
    reason: str
    since_s: float = -math.inf
    """When the number changed last, by the caller's clock."""


def first_wanted(settings: AllTables) -> Wanted:
    """Return the number before anything is measured."""
    least = settings.fleet.min_actors
    name = "fleet.min_actors" if settings.actors.count < least else "actors.count"
    return _bounded(max(least, settings.actors.count), f"nothing is measured yet: {name}", settings)


def next_wanted(before: Wanted, measured: Measured, settings: AllTables, *, now_s: float) -> Wanted:
    """Return the number after a batch; mostly the one before.

    Args:
        before: The last answer.
        measured: Since then, or over some minutes.
        settings: Of the run; `fleet` and the bound on policy lag count.
        now_s: Of any clock, seconds.
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
        return Wanted(goal.actors, goal.reason, now_s)
    kept = goal.reason if goal.actors == before.actors else why
    return Wanted(before.actors, kept, before.since_s)


def actors_to_feed(actors: float, *, span_s: float, least_s: float) -> int:
    """Return how many actors make a batch in `least_s`, where `actors` take `span_s`.

    Args:
        actors: That work all of the time.
        span_s: From batch to batch now.
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


def _bounded(actors: int, why: str, settings: AllTables) -> Wanted:
    """Keep a number within all bounds; the reason names the one that it met."""
    fleet, run = settings.fleet, settings.run
    most = fleet.max_actors or settings.broker.max_actors
    tasks = max_units_in_flight(run, settings.buffer) * run.group_size
    bounds = [
        (tasks, f"run.max_policy_lag {run.max_policy_lag} admits {tasks} episodes at a time"),
        (most, f"fleet.max_actors {most}"),
        (affordable_actors(fleet), f"fleet.max_per_hour {fleet.max_per_hour}"),
    ]
    for bound, name in bounds:
        if bound is not None and actors > bound:
            actors, why = bound, f"{why}; {actors} but for {name}"
    if actors < fleet.min_actors:
        actors, why = fleet.min_actors, f"{why}; {actors} but for fleet.min_actors"
    return Wanted(actors, why)
