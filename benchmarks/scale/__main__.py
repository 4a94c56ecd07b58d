"""Fleets of up to 1,000 actors, simulated: `python -m benchmarks.scale [--table]`.

Engines, training, transfers and machines that are taken away are simulated (`workload.py` has every
number and its source); leases, admission, resumption, claims and drops are the store's own scripts.
Arms are named `ACTORS x lag LAG`, first with batches of 1,024 episodes, then with 4,096 and a
learner four times as fast, and there with each way for weights to travel.

The JSON object that comes last has, for each arm: the share of time in which the learner waits and
an actor has no episode at all, the share of all places in use, the lag of the oldest token of
trained episodes, the share of groups dropped as too old, bytes per second through broker, Redis and
the learner's uplink, and the share of a core that brokers and Redis need, from costs measured in
the same run. Ratios: trained tokens per second over those of a quarter of the actors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.scale.costs import Costs, measure_costs
from benchmarks.scale.fleet import Fleet
from benchmarks.scale.report import ratios, table
from benchmarks.scale.workload import (
    BYTES_A_TOKEN,
    HEARTBEAT_S,
    PROMPT_BYTES,
    SNAPSHOT_S,
    SPARSE_SHARE,
    TRANSPORTS,
    Workload,
)
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since

SMALL = Workload()
LARGE = replace(SMALL, groups_per_batch=512, learner_tokens_per_s=640_000.0)
LAGS = (1, 2, 4, 8)
SMALL_FLEETS = (16, 64, 256, 1000)
LARGE_FLEETS = (256, 1000)
LARGE_LAGS = (2, 8)
WARM_UP, STEPS = 4, 10
MOST_S = 4 * 3600.0
MEAN_RECORD_BYTES = 22_000


def main() -> None:
    """Simulate all arms; one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print Markdown before the JSON")
    parser.add_argument("--lag", type=int, action="append", help="of the arms; may be given again")
    parser.add_argument("--short", action="store_true", help="the smallest fleet alone")
    chosen = parser.parse_args()
    say = say_since(time.monotonic())
    costs = measure_costs(MEAN_RECORD_BYTES)
    say(f"costs: {costs}")
    found = {}
    for name, make in arms(chosen.lag or LAGS, short=chosen.short).items():
        found[name] = make(costs)
        say(f"{name}: {found[name]['learner_idle']} of the time the learner waits")
    if chosen.table:
        print(table(found))
    answer = {"arms": found, "ratios": ratios(found), "machine": describe_machine()}
    print(json.dumps(answer))


def arms(lags: Sequence[int], *, short: bool) -> dict[str, Callable[[Costs], dict[str, Any]]]:
    """Name the arms in the order in which they run."""
    if short:
        return {"16 x lag 2": _arm(SMALL, 16, 2, "broadcast")}
    small = [(SMALL, n, lag, "broadcast") for n in SMALL_FLEETS for lag in lags]
    large = [
        (LARGE, n, lag, "broadcast") for n in LARGE_FLEETS for lag in LARGE_LAGS if lag in lags
    ]
    ways = [(LARGE, 1000, 2, way) for way in TRANSPORTS if way != "broadcast" and 2 in lags]
    return {_name(*arm): _arm(*arm) for arm in (*small, *large, *ways)}


def _name(workload: Workload, actors: int, lag: int, transport: str) -> str:
    name = f"{actors} x lag {lag}"
    if workload is LARGE:
        name += ", batches of 4,096"
    return name if transport == "broadcast" else f"{name}, {transport}"


def _arm(
    workload: Workload, actors: int, lag: int, transport: str
) -> Callable[[Costs], dict[str, Any]]:
    def run(costs: Costs) -> dict[str, Any]:
        fleet = Fleet(workload, actors=actors, max_policy_lag=lag, transport=transport, seed=1)
        figures = fleet.run(warm_up=WARM_UP, steps=STEPS, most_s=MOST_S)
        shape = {"actors": actors, "lag": lag, "batch": workload.batch, "transport": transport}
        return shape | figures | _traffic(workload, figures, actors, transport, costs)

    return run


def _traffic(
    workload: Workload, figures: dict[str, float], actors: int, transport: str, costs: Costs
) -> dict[str, float]:
    """Bytes and messages per second, and what they cost; tokens travel in chunks and once more."""
    tokens, episodes = figures["submitted_tokens_per_s"], figures["episodes_per_s"]
    busy = actors * (1 - figures["actor_idle"])
    broker_bytes = 2 * BYTES_A_TOKEN * tokens + PROMPT_BYTES * episodes
    versions = 1 / max(figures["step_every_s"], figures["weights_arrive_s"])
    share = {"broadcast": 1.0, "sparse": actors * SPARSE_SHARE}.get(transport, float(actors))
    lines = figures["places_used"] * actors * workload.capacity / SNAPSHOT_S
    return {
        "beats_per_s": round(busy / SNAPSHOT_S + (actors - busy) / HEARTBEAT_S, 1),
        "broker_mb_per_s": round(broker_bytes / 1e6, 2),
        "redis_mb_per_s": round((broker_bytes + BYTES_A_TOKEN * tokens) / 1e6, 2),
        "weights_mb_per_s": round(versions * share * workload.weight_bytes / 1e6),
        **costs.cores(lines_per_s=lines, episodes_per_s=episodes),
    }


if __name__ == "__main__":
    main()
