"""The learner's place in the ring without a learner: claims, seals, commits and forgets.

Everything else is real: the store, the curriculum, and the publisher that hands actors their first
and only weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from broker.protocol.codec import encode_spec
from buffer import operations
from buffer.operations.values import NewTask
from buffer.record.episode import Episode, PolicyVersion
from buffer.store import Store
from configs.secrets import redis_url
from configs.settings import Settings
from learner.assembly import load_policy, make_publisher
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.resume import take_over
from learner.data.claims import Claims
from learner.data.curriculum import training_task
from learner.data.retrying_store import RetryingStore
from learner.model.ranks import join

AHEAD = 64  # batches that are created before they are needed: actors never wait for tasks


class Sink:
    """Takes batch after batch as a learner that needs no time for them.

    Example:
        with Sink(settings) as sink:
            for episodes in sink.batches(until=time.time() + 10):
                ...
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._raw_store = Store(redis_url(settings.run, settings.buffer), settings.run.name)
        self._store = RetryingStore(self._raw_store)
        self._ranks = join("cpu", threads=1)
        policy = load_policy(settings, self._ranks)
        checkpoints = Checkpoints(settings.run.folder / "checkpoints", keep=1, ranks=self._ranks)
        start = take_over(settings.run, settings.buffer, self._store, checkpoints)
        self._lineage = start.lineage
        ledger = start.ledger()
        self._claims = Claims(
            self._store,
            settings.run,
            buffer=settings.buffer,
            learner=settings.learner,
            algorithm=settings.algorithm,
            rewards=settings.rewards,
            replay=settings.replay,
            ledger=ledger,
            vocabulary=policy.vocabulary,
        )
        self._step = 0
        self._create(range(AHEAD * settings.run.groups_per_batch))
        self._publisher = make_publisher(settings, self._store, policy, ledger)
        self._publisher.publish(policy.causal_lm, PolicyVersion(self._lineage, 0))

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()
        self._ranks.destroy_process_group()
        self._raw_store.close()

    def batches(self, *, until: float) -> Iterator[tuple[Episode, ...]]:
        """Yield the batches that are complete until then, Unix seconds."""
        per_batch = self._settings.run.groups_per_batch
        while True:
            batch = self._claims.wait(self._step + 1, until=lambda: time.time() >= until)
            if batch is None:
                return
            self._step = batch.step
            self._store.run(operations.advance(self._lineage, self._step))
            self._store.run(operations.commit(self._lineage, self._step))
            first = (self._step - 1 + AHEAD) * per_batch
            self._create(range(first, first + per_batch))
            yield batch.episodes

    def _create(self, groups: range) -> None:
        run = self._settings.run
        tasks = [
            NewTask(task_id, group, encode_spec(training_task(run, task_id)))
            for group in groups
            for task_id in range(group * run.group_size, (group + 1) * run.group_size)
        ]
        self._store.run(operations.create(self._lineage, tasks))
