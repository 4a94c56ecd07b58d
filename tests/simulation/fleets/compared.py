"""The same fleet in the simulator and in the model of rates, by which its number is judged.

The rate of one actor is measured in the simulator; all else is given to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.configs.support.fleet.rates import Hour, Load, Market, play
from tests.simulation.actor import TRANSFER_S
from tests.simulation.fleets.simulated import FleetScenario, simulated

MOST_APART, MOST_HOURS_APART = 0.03, 0.35
"""Of the learner's idle share, and relative of actor-hours, in the two."""


def _batches_of_one(scenario: FleetScenario) -> float:
    """Measure how many batches one actor makes in a second that never waits, in the simulator."""
    alone = replace(
        scenario,
        first=1,
        max_actors=1,
        groups_per_batch=scenario.groups_per_batch // 6,
        train_s=0.1,
        speeds=(1.0, 1.0),
        taken_at_s=(),
        lasts_s=900.0,
    )
    return simulated(alone).batches / alone.lasts_s / 6


def in_rates(scenario: FleetScenario, rate: float) -> Hour:
    """Play the same in the model of rates, of which one actor makes `rate` batches a second."""
    load = Load(
        need=lambda _: 1 / (rate * scenario.train_s),
        step_s=scenario.train_s,
        lag=scenario.max_policy_lag,
        start_s=scenario.start_s,
        first=scenario.first,
        version_s=TRANSFER_S,
    )
    market = Market(
        capacity=lambda _: 1.0, taken_per_hour=lambda _: 0.0, taken_at_s=scenario.taken_at_s
    )
    settings = scenario.settings(Path("nowhere"))
    return play(load, market, settings, seed=scenario.seed, knows=False, lasts_s=scenario.lasts_s)


@dataclass(frozen=True)
class Difference:
    """A scenario in both."""

    name: str
    need: float
    """Actors that feed the learner."""
    ours: Hour
    """In the simulator."""
    model: Hour

    @property
    def holds(self) -> bool:
        apart = abs(share_of_idle(self.ours) - share_of_idle(self.model))
        hours = self.ours.actor_hours / self.model.actor_hours
        return apart <= MOST_APART and max(hours, 1 / hours) <= 1 + MOST_HOURS_APART

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.need:.1f} actors needed; simulator and rates: learner idle "
            f"{share_of_idle(self.ours):.1%} and {share_of_idle(self.model):.1%}, actor-hours "
            f"{self.ours.actor_hours:.2f} and {self.model.actor_hours:.2f}, batches "
            f"{self.ours.batches} and {self.model.batches}, wanted "
            f"{_path(self.ours)} and {_path(self.model)}: {'holds' if self.holds else 'BROKEN'}"
        )


def share_of_idle(hour: Hour) -> float:
    """Share of the learner's time while all wanted actors were there."""
    return hour.idle_s / hour.settled_s


def _path(hour: Hour) -> str:
    return " -> ".join(map(str, hour.wanted))


SCENARIOS: dict[str, FleetScenario] = {
    "begins with too few": FleetScenario(seed=1, first=1),
    "begins with too many": FleetScenario(seed=2, first=8),
    "loses a third twice": FleetScenario(seed=3, first=4, taken_at_s=(500.0, 1000.0)),
}


def difference(name: str) -> Difference:
    """Play one of `SCENARIOS` in both."""
    scenario = SCENARIOS[name]
    rate = _batches_of_one(scenario)
    need = 1 / (rate * scenario.train_s)
    return Difference(name, need, simulated(scenario), in_rates(scenario, rate))
