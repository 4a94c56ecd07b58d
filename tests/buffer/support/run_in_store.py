"""A small run for tests: begins it, and shortens the calls that every test makes."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import redis

from buffer import operations
from buffer.operations.keys import EVAL_BASE, run_prefix
from buffer.operations.values import BeatLine, LeasedTask, NewTask, Stats, SubmitLine
from buffer.store import Store

GROUP_SIZE = 4
UNITS_PER_BATCH = 2
MAX_POLICY_LAG = 1
TTL_MS = 60_000


class RunInStore:
    """One learner's and one actor's view of the store, and a plain client to look behind it."""

    def __init__(self, store: Store, url: str, *, margin: float = 1.0) -> None:
        """Begin the run and its first lineage."""
        self.store = store
        self.redis = redis.Redis.from_url(url)
        self.prefix = run_prefix("run")
        store.run(
            operations.begin_run(
                "c0",
                {"environment": "e0"},
                units_per_batch=UNITS_PER_BATCH,
                max_policy_lag=MAX_POLICY_LAG,
                margin=margin,
                group_size=GROUP_SIZE,
                min_group_size=2,
            )
        )
        lineage = store.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        self.lineage = lineage

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.redis.close()

    def create(self, units: int, *, first: int = 0) -> int:
        """Create whole groups."""
        ids = range(first * GROUP_SIZE, (first + units) * GROUP_SIZE)
        tasks = [NewTask(i, i // GROUP_SIZE, f"spec {i}".encode()) for i in ids]
        return self.store.run(operations.create(self.lineage, tasks))

    def create_eval(self, tasks: int, *, step: int = 0, first: int = 0) -> int:
        """Create evaluation tasks of one round."""
        ids = range(EVAL_BASE + first, EVAL_BASE + first + tasks)
        new = [NewTask(i, i, b"eval", step) for i in ids]
        return self.store.run(operations.create(self.lineage, new))

    def lease(self, n: int = 100, *, step: int = 0, incarnation: str = "a") -> list[LeasedTask]:
        """Lease for an actor at this step of the lineage."""
        version = (self.lineage, step)
        call = operations.lease(incarnation, ttl_ms=TTL_MS, n=n, version=version)
        return self.store.run(call).tasks

    def lease_status(self, n: int = 100, *, version: tuple[int, int] | None = None) -> str:
        """Lease and tell only how it went."""
        version = version or (self.lineage, 0)
        return self.store.run(operations.lease("a", ttl_ms=TTL_MS, n=n, version=version)).status

    def beat(
        self, task: LeasedTask, offset: int = 0, num_tokens: int = 0, *, key: str = ""
    ) -> tuple[str, int]:
        """Beat for one lease; the chunk's bytes say which tokens it holds."""
        chunk = "".join(f"{offset + i}," for i in range(num_tokens)).encode()
        line = BeatLine(task.task_id, task.fence, offset, num_tokens, chunk, key)
        return self.store.run(operations.beat(ttl_ms=TTL_MS, lines=[line]))[0]

    def submit(self, tasks: list[LeasedTask], key: str = "") -> list[str]:
        """Submit a record for each lease."""
        lines = [
            SubmitLine(task.task_id, task.fence, f"record {task.task_id}".encode(), key)
            for task in tasks
        ]
        return self.store.run(operations.submit(lines))

    def expire(self, tasks: list[LeasedTask], *, max_attempts: int = 3) -> list[int]:
        """Let leases run out, as if time had passed, and reap."""
        for task in tasks:
            leases = ":lease:eval" if task.task_id >= EVAL_BASE else ":lease"
            self.redis.zadd(self.prefix + leases, {str(task.task_id): 1}, xx=True)
        return self.store.run(operations.reap(max_attempts=max_attempts))

    def fill(self, units: int, *, first: int = 0, step: int = 0) -> None:
        """Create whole groups and finish them."""
        self.create(units, first=first)
        tasks = self.lease(units * GROUP_SIZE, step=step)
        assert len(tasks) == units * GROUP_SIZE
        self.submit(tasks)

    def claimed(self, k: int, units: int = UNITS_PER_BATCH, *, num_read: int = 0) -> list[int]:
        """Claim for batch k; returns the units that are listed."""
        claim = self.store.run(operations.claim(self.lineage, k, units, num_read=num_read))
        return [unit.group_id for unit in claim.units]

    def train(self, k: int, units: int = UNITS_PER_BATCH) -> None:
        """Claim, seal and train batch k."""
        assert self.store.run(operations.claim(self.lineage, k, units)).complete
        self.store.run(operations.seal(self.lineage, k))
        self.store.run(operations.advance(self.lineage, k))

    def stats(self) -> Stats:
        """Count, and check that no task is missing."""
        stats = self.store.run(operations.stats())
        assert stats.accounted == stats.created
        return stats
