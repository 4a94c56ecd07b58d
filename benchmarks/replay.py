"""The time to draw kept groups for a batch, by the number kept; one JSON object.

    python -m benchmarks.replay [--most 1000000]

A Redis of its own gets kept groups of one episode with a record of 16 bytes each: the index is
measured, not the records. One measurement is one call that draws 64 groups and the call that gives
them back.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.delivery.arms import running_redis
from benchmarks.support.machine import describe_machine
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.store import Store

GROUPS = 64
CALLS = 50
BATCH = 10_000
MEMORY_MB = 8192

FILL = """
local run, first = KEYS[1], tonumber(ARGV[1])
for gid = first, first + ARGV[2] - 1 do
  redis.call('SET', run .. ':e:' .. gid, 'sixteen bytes...')
  redis.call('HSET', run .. ':x:' .. gid, 'ids', gid, 'bytes', 16, 'uses', 0, 'most', 1000,
    'born', gid, 'rank', -gid)
  redis.call('ZADD', run .. ':replay', -gid, gid)
  redis.call('ZADD', run .. ':replay:age', gid, gid)
end
"""


def main() -> None:
    """Measure 10^4, 10^5, ... kept groups; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10**6, help="kept groups of the last round")
    most = parser.parse_args().most
    arms: dict[str, dict[str, float]] = {}
    with (
        TemporaryDirectory() as folder,
        running_redis(Path(folder), maxmemory_mb=MEMORY_MB) as (client, url_file),
        Store(url_file.read_text().strip(), "replay") as store,
    ):
        begin(store)
        kept = 0
        for target in (10**power for power in range(4, 8) if 10**power <= most):
            for first in range(kept, target, BATCH):
                client.eval(FILL, 1, run_prefix("replay"), first, BATCH)
            kept = target
            used_mb = round(store.run(operations.memory()).used_bytes / 2**20)
            arms[f"{kept} kept"] = {"redis_mib": used_mb} | measure(store)
    fewest, most_kept = next(iter(arms.values())), list(arms.values())[-1]
    ratios = {
        f"fewest_over_most_{name}": round(fewest[name] / most_kept[name], 2)
        for name in fewest
        if name != "redis_mib"
    }
    print(json.dumps({"arms": arms, "ratios": ratios, "machine": describe_machine()}))


def begin(store: Store) -> None:
    """Enter a run whose groups have one episode."""
    store.run(
        operations.begin_run(
            "benchmark",
            {},
            units_per_batch=GROUPS,
            max_policy_lag=1,
            margin=1.0,
            group_size=1,
            min_group_size=1,
        )
    )
    store.run(operations.begin_lineage(0, 0))


def measure(store: Store) -> dict[str, float]:
    """Draw and give back, again and again; microseconds per group, client included."""
    figures = {}
    rng = random.Random(0)
    for sampling in ("uniform", "newest", "prioritised"):
        took_us = []
        for _ in range(CALLS):
            numbers = [rng.random() for _ in range(GROUPS)]
            began = time.perf_counter()
            units = store.run(operations.reuse(1, 1, GROUPS, sampling=sampling, numbers=numbers))
            took_us.append((time.perf_counter() - began) / GROUPS * 1e6)
            assert len({unit.group_id for unit in units}) == GROUPS
            store.run(operations.abandon(1, 1, "measured"))
        figures[f"{sampling}_us_per_group"] = round(statistics.median(took_us), 1)
    return figures


if __name__ == "__main__":
    main()
