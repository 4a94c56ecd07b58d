"""A run without engine and trainer: real Redis, real broker process, a learner that only claims.

The learner creates tasks ahead, claims, seals, reads, advances and commits as the real one does;
what it would decode and train it yields as bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from benchmarks.delivery.records import FIRST_TASK, GROUP_SIZE
from benchmarks.support.machine import REPOSITORY
from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.values import NewTask
from buffer.store import Store
from configs.hashes import run_hashes, settings_hash
from configs.loader import load
from configs.settings import Settings
from console.run.plan import commands, prepare, redis_command
from console.run.process import Process
from console.run.process_guard import ProcessGuard
from console.run.redis_server import wait_until_ready
from console.run.run_folder import RunFolder
from console.run.user_files import resolve

GROUPS_PER_BATCH = 32  # 256 episodes of 16 KiB
AHEAD = 16  # batches of tasks that are created before they are needed
LOOK_EVERY_S = 0.02  # as the learner's claims
OVERRIDES = (
    "run.name=delivery",
    f"run.group_size={GROUP_SIZE}",
    f"run.groups_per_batch={GROUPS_PER_BATCH}",
    "run.max_policy_lag=2",
    "run.max_prompt_tokens=1024",
    "run.max_completion_tokens=2048",
    "buffer.maxmemory_mb=2048",
    "broker.max_actors=2048",
)


@dataclass(slots=True)
class Ring:
    """A run that has begun."""

    settings: Settings
    store: Store
    client: redis.Redis
    broker: Process
    _lineage: int = 0
    _step: int = 0
    _known: set[int] = field(default_factory=set)
    """Units that the batch is known to have."""
    _created: int = field(default=FIRST_TASK // GROUP_SIZE)

    @property
    def config(self) -> Path:
        """What its processes read."""
        return self.settings.run.folder / "config.yaml"

    @property
    def _groups_per_batch(self) -> int:
        return self.settings.run.groups_per_batch

    def begin(self) -> None:
        """Enter the run into the store and create the first tasks."""
        run = self.settings.run
        self.store.run(
            operations.begin_run(
                settings_hash(self.settings.run),
                run_hashes(self.settings.run),
                units_per_batch=run.groups_per_batch,
                max_policy_lag=run.max_policy_lag,
                margin=self.settings.buffer.margin,
                group_size=run.group_size,
                min_group_size=run.group_size,
            )
        )
        lineage = self.store.run(operations.begin_lineage(0, 0))
        assert lineage is not None, "nobody else begins this run"
        self._lineage = lineage
        for _ in range(AHEAD):
            self._create()

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the records of each batch that is complete, and nothing while there is none."""
        while True:
            records = self.take()
            yield records or []
            if records is None:
                time.sleep(LOOK_EVERY_S)

    def take(self) -> list[bytes] | None:
        """Claim, seal, read and commit the next batch; None while it is not complete."""
        step = self._step + 1
        claim = self.store.run(
            operations.claim(self._lineage, step, self._groups_per_batch, num_read=len(self._known))
        )
        if not claim.complete:
            self._known |= {unit.group_id for unit in claim.units}
            return None
        self._known.clear()
        self.store.run(operations.seal(self._lineage, step))
        ids = [task_id for unit in claim.units for task_id in unit.task_ids]
        records = self.store.run(operations.records(ids))
        self.store.run(operations.advance(self._lineage, step))
        self.store.run(operations.commit(self._lineage, step))
        self._step = step
        self._create()
        return [record for record in records if record is not None]

    def _create(self) -> None:
        """Create the tasks of one more batch."""
        groups = range(self._created, self._created + self._groups_per_batch)
        self._created = groups.stop
        tasks = [
            NewTask(task_id, group, encode_spec(_spec(task_id, group)))
            for group in groups
            for task_id in range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        ]
        self.store.run(operations.create(self._lineage, tasks))


def _spec(task_id: int, group: int) -> TaskSpec:
    return TaskSpec(group, index=group, seed=task_id, purpose="train", temperature=1.0)


@contextmanager
def ring(folder: Path, *overrides: str) -> Iterator[Ring]:
    """Start Redis and a broker as `nyala up` does; both end with the block."""
    overrides = (*OVERRIDES, *overrides, f"run.directory={folder}")
    settings = resolve(load(REPOSITORY / "configs" / "demo.yaml", list(overrides)))
    files = RunFolder(settings.run.folder)
    server = prepare(settings, files, redis_url=None)
    assert server is not None, "this run has a server of its own"
    settings = load(files.config)
    guard = ProcessGuard(grace_s=5.0)
    started: list[Process] = []
    try:
        redis_process = Process(redis_command(server, files, settings), guard)
        [broker] = [c for c in commands(settings, files) if c.role == "broker"]
        broker_process = Process(broker, guard)
        started += [redis_process, broker_process]
        redis_process.start()
        wait_until_ready(server.url, has_ended=lambda: redis_process.poll() is not None)
        with (
            Store(server.url, settings.run.name) as store,
            redis.Redis.from_url(server.url) as client,
        ):
            running = Ring(settings, store, client, broker_process)
            running.begin()
            broker_process.start()
            yield running
    finally:
        for process in reversed(started):
            process.kill()
        guard.close()
