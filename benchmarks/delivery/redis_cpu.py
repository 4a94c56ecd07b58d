"""CPU time of Redis per episode: scripts with the libraries they include, and with all libraries.

    python -m benchmarks.delivery.redis_cpu [--tasks 8] [--rounds 100]

Real operations on a Redis of its own: create, lease, two heartbeats with a chunk, submit, claim,
seal, advance, commit, for so many tasks at a time; records have 16 KiB. The arms take turns, round
by round. The JSON object that comes last has microseconds of Redis per episode (user and system, of
INFO): median and least round of each arm, and the median of each round's `every_library` over
`included`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from benchmarks.delivery.arms import running_redis
from benchmarks.delivery.records import GROUP_SIZE, RECORD_BYTES
from benchmarks.support.machine import describe_machine
from buffer import operations
from buffer.client.scripts import FILES, Script, load_script, make_script
from buffer.operations.values import BeatLine, NewTask, SubmitLine
from buffer.store import Store

EPISODES = 256  # of one round
RECORD = bytes(RECORD_BYTES)  # the store does not look inside
CHUNK = bytes(128 * 9)  # 128 tokens
TTL_MS = 60_000
LIBRARIES = ("keys", "units", "tasks", "rounds", "withdrawal", "replay")


@cache
def with_every_library(name: str) -> Script:
    """Put all libraries before a script, whether it uses them or not."""
    return make_script("\n".join(FILES[part].read_text() for part in (*LIBRARIES, name)))


ARMS = {"included": load_script, "every_library": with_every_library}


def main() -> None:
    """Measure both arms in turns; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=8, help="of one call; whole groups of 8")
    parser.add_argument("--rounds", type=int, default=100, help="of each arm")
    chosen = parser.parse_args()
    with (
        TemporaryDirectory(prefix="nyala-redis-cpu-") as folder,
        running_redis(Path(folder)) as (client, url_file),
    ):
        url = url_file.read_text().strip()
        runs = {arm: Run(Store(url, arm, scripts=load)) for arm, load in ARMS.items()}
        figures: dict[str, list[float]] = {arm: [] for arm in runs}
        for run in runs.values():
            run.carry(chosen.tasks)  # Redis reads the scripts
        for _ in range(chosen.rounds):
            for arm, run in runs.items():
                before = cpu_us(client)
                for _ in range(EPISODES // chosen.tasks):
                    run.carry(chosen.tasks)
                figures[arm].append((cpu_us(client) - before) / EPISODES)
    arms = {
        arm: {"median_us": round(statistics.median(us), 1), "least_us": round(min(us), 1)}
        for arm, us in figures.items()
    }
    ratios = [a / b for a, b in zip(figures["every_library"], figures["included"], strict=True)]
    ratio = round(statistics.median(ratios), 3)
    answer = {"arms": arms, "every_library_over_included": ratio, "tasks": chosen.tasks}
    print(json.dumps(answer | {"machine": describe_machine()}))


def cpu_us(client: redis.Redis) -> float:
    """Read the CPU time that the server has used."""
    used = client.info("cpu")
    return float(1e6 * (used["used_cpu_user"] + used["used_cpu_sys"]))


class Run:
    """A run whose episodes take the whole way, some at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch = 0
        store.run(
            operations.begin_run(
                "benchmark",
                {},
                units_per_batch=EPISODES,
                max_policy_lag=1,
                margin=1.0,
                group_size=GROUP_SIZE,
                min_group_size=1,
            )
        )
        store.run(operations.begin_lineage(0, 0))

    def carry(self, tasks: int) -> None:
        """Create tasks and see them through to the commit."""
        store, first, version = self._store, self._batch * tasks, (1, self._batch)
        self._batch += 1
        new = [NewTask(i, i // GROUP_SIZE, b"spec") for i in range(first, first + tasks)]
        store.run(operations.create(1, new))
        answer = store.run(operations.lease("actor", ttl_ms=TTL_MS, n=tasks, version=version))
        leased = [(task.task_id, task.fence) for task in answer.tasks]
        for offset in (0, 128):
            lines = [BeatLine(task, fence, offset, 128, CHUNK) for task, fence in leased]
            store.run(operations.beat(ttl_ms=TTL_MS, lines=lines))
        verdicts = store.run(operations.submit([SubmitLine(*lease, RECORD) for lease in leased]))
        assert verdicts == ["OK"] * tasks, f"every episode must count, got {verdicts}"
        store.run(operations.claim(1, self._batch, tasks // GROUP_SIZE))
        store.run(operations.seal(1, self._batch))
        store.run(operations.advance(1, self._batch))
        assert store.run(operations.commit(1, self._batch)) == tasks


if __name__ == "__main__":
    main()
