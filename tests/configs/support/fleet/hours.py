"""Three traces of spot capacity, fleets of 2 to 256 actors, and the comparison over many seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from configs.settings import Settings
from tests.configs.support.fleet.rates import HOUR_S, MOST, Hour, Load, Market, play

MOST_IDLE, MOST_HOURS, MOST_CHANGES = 0.05, 1.25, 12


def calm(_chance: random.Random) -> Market:
    """Room for all; three of a hundred are taken away in an hour."""
    return Market(capacity=lambda _: 1.0, taken_per_hour=lambda _: 0.03)


def storms(chance: random.Random) -> Market:
    """Two or three times in the hour most of them are taken at once, and for minutes none comes."""
    begins = sorted(chance.uniform(300, HOUR_S) for _ in range(chance.choice((2, 3))))
    lasts = [chance.uniform(120, 300) for _ in begins]
    left = [chance.uniform(0.05, 0.6) for _ in begins]

    def capacity(now_s: float) -> float:
        under_way = zip(begins, lasts, left, strict=True)
        return min((room for at, s, room in under_way if at <= now_s < at + s), default=1.0)

    return Market(capacity=capacity, taken_per_hour=lambda _: 0.1)


def prices(chance: random.Random) -> Market:
    """The price goes up and down twice in the hour, and with it how often actors are taken."""
    phase = chance.uniform(0, 2 * math.pi)

    def price(now_s: float) -> float:
        return 1.0 + 0.8 * math.sin(phase + 4 * math.pi * now_s / HOUR_S)

    return Market(
        capacity=lambda now_s: 1.0 if price(now_s) < 1.7 else 0.7,
        taken_per_hour=lambda now_s: 0.2 * price(now_s),
    )


TRACES = (calm, storms, prices)


@dataclass(frozen=True)
class Compared:
    """A trace over many seeds."""

    name: str
    idle: float
    """Mean share of the learner's time, while all wanted actors were there."""
    worst_idle: float
    """Of a run whose weights take as long as a batch at a lag of 1: there actors and learner wait
    for each other, and no number of actors helps much."""
    settled: float
    """Share of the time in which they were."""
    ratio: float
    """Actor-hours over those of the policy that knows the trace, mean of the runs."""
    worst_ratio: float
    most_changes: int
    batches: float
    """Over those of the policy that knows, mean."""

    @property
    def holds(self) -> bool:
        return (
            self.idle <= MOST_IDLE
            and self.ratio <= MOST_HOURS
            and self.most_changes <= MOST_CHANGES
        )

    def __str__(self) -> str:
        return (
            f"{self.name}: learner idle {self.idle:.1%} (worst {self.worst_idle:.1%}) in the "
            f"{self.settled:.0%} of the time without actors that start, actor-hours "
            f"{self.ratio:.2f} of those of a policy that knows the trace (worst "
            f"{self.worst_ratio:.2f}), batches "
            f"{self.batches:.2f}, at most {self.most_changes} changes: "
            f"{'holds' if self.holds else 'BROKEN'}"
        )


def case(trace: object, seed: int) -> tuple[Load, Market, Settings]:
    """Draw a run: the actors that it needs and begins with, and how fast they start."""
    chance = random.Random(f"{getattr(trace, '__name__', '')}-{seed}")
    need = math.exp(chance.uniform(math.log(2.0), math.log(MOST / 1.2)))
    first = max(1, min(MOST, round(need * chance.choice((0.25, 0.6, 1.0, 1.3)))))
    lag = chance.randint(1, 4)
    changed, changes_s = chance.choice((1.0, 1.0, 0.6, 1.2)), chance.uniform(900, 2400)
    load = Load(
        need=lambda now_s: need * (changed if now_s >= changes_s else 1.0),
        step_s=chance.uniform(8, 60),
        lag=lag,
        start_s=(45.0, chance.uniform(60, 180)),
        first=first,
        version_s=chance.uniform(0.5, 8),
    )
    tree = {
        "run": {"model": "m", "max_policy_lag": lag},
        "actors": {"count": first},
        "fleet": {"max_actors": MOST},
    }
    market: Market = trace(chance)  # type: ignore[operator]
    return load, market, Settings.model_validate(tree)


def compared(trace: object, seeds: Iterable[int]) -> Compared:
    """Play the same hours with both policies."""
    pairs: list[tuple[Hour, Hour]] = []
    for seed in seeds:
        load, market, settings = case(trace, seed)
        ours, theirs = (
            play(load, market, settings, seed=seed, knows=knows) for knows in (False, True)
        )
        pairs.append((ours, theirs))
    ratios = [ours.actor_hours / theirs.actor_hours for ours, theirs in pairs]
    return Compared(
        getattr(trace, "__name__", ""),
        idle=sum(ours.idle_s for ours, _ in pairs) / sum(ours.settled_s for ours, _ in pairs),
        worst_idle=max(ours.idle_s / max(ours.settled_s, 1.0) for ours, _ in pairs),
        settled=sum(ours.settled_s for ours, _ in pairs) / (len(pairs) * HOUR_S),
        ratio=sum(ratios) / len(ratios),
        worst_ratio=max(ratios),
        most_changes=max(ours.changes for ours, _ in pairs),
        batches=sum(ours.batches / theirs.batches for ours, theirs in pairs) / len(pairs),
    )
