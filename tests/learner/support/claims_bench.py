"""A begun run in a real store, whose batches a test fills, claims and begins anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import redis

from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.operations.values import NewTask, Stats
from buffer.record.episode import INDEX, Episode, PolicyVersion
from buffer.store import Store
from configs.settings import Settings
from learner.data.claims import Claims
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore
from tests.learner.support.made_claims import make_claims
from tests.learner.support.made_episodes import answers_at, make_episode
from tests.learner.support.tiny_run import answer_leases, new_ledger, tiny_settings

VOCABULARY = 32


@dataclass(slots=True)
class Bench:
    """A begun run with a learner's and an actor's side."""

    store: Store
    url: str
    settings: Settings
    lineage: int
    ledger: Ledger = field(init=False)
    patient: RetryingStore = field(init=False)

    def claims(self) -> Claims:
        """Start a life of the learner in the present lineage."""
        self.ledger = new_ledger(self.lineage, self.store.run(operations.lineages()))
        self.patient = RetryingStore(self.store)
        return make_claims(self.patient, self.settings, ledger=self.ledger, vocabulary=VOCABULARY)

    def restart(self, step: int) -> Claims:
        """Begin a new lineage at `step`, as after a crash."""
        lineage = self.store.run(operations.begin_lineage(self.lineage, step))
        assert lineage is not None
        self.lineage = lineage
        return self.claims()

    def fill(
        self,
        units: int,
        *,
        first: int = 0,
        version: tuple[int, int] | None = None,
        answered_by: tuple[int, int] | None = None,
        versions_of: Callable[[int], Sequence[tuple[PolicyVersion, int]]] | None = None,
        prompt: Sequence[int] = (5, 6, 7),
        completion: Sequence[int] = (8, 9),
        reward: Callable[[int], float] = lambda task_id: float(task_id % 2),
    ) -> None:
        """Create `units` groups and let an actor at `version` finish them.

        `answered_by` is what it says its version is, `versions_of` the versions of a task's
        tokens in its place, `reward` what it gives for a task.
        """
        size = self.settings.run.group_size
        ids = range(first * size, (first + units) * size)
        spec = TaskSpec(0, 0, 0, "train", 1.0)
        tasks = [NewTask(i, i // size, encode_spec(spec)) for i in ids]
        self.store.run(operations.create(self.lineage, tasks))
        version = version or (self.lineage, 0)

        def answer(task_id: int, _spec: TaskSpec) -> Episode:
            group_id = task_id // size
            spans = [(PolicyVersion(*(answered_by or version)), 0)]
            episode = make_episode(
                task_id,
                group_id=group_id,
                prompt=prompt,
                completion=completion,
                versions=spans if versions_of is None else versions_of(task_id),
                reward=reward(task_id),
            )
            return replace(episode, metadata={INDEX: str(group_id)})

        assert answer_leases(self.store, version, answer) == units * size

    def answer(self, number: int) -> None:
        """Let an actor with the first weights finish so many tasks that are there."""
        at_first = (self.lineage, 0)
        found = answer_leases(self.store, at_first, answers_at(PolicyVersion(*at_first)))
        assert found == number

    def stats(self) -> Stats:
        """Count tasks by state."""
        return self.store.run(operations.stats())

    def filter(self, folder: Path, **algorithm: object) -> None:
        """Make it a run that filters groups of equal rewards."""
        algorithm = {"filter_zero_variance": True, **algorithm}
        self.settings = tiny_settings(folder, algorithm=algorithm)

    def spoil(self, task_id: int) -> None:
        """Make a record unreadable."""
        with redis.Redis.from_url(self.url) as client:
            client.set(f"{run_prefix('tiny')}:e:{task_id}", b"nonsense")

    def be_repeatable(self) -> None:
        """Make it a run that is to be the same each time."""
        run = self.settings.run.model_copy(update={"deterministic": True})
        self.settings = self.settings.model_copy(update={"run": run})


def groups_of(episodes: tuple[Episode, ...]) -> list[int]:
    return sorted({episode.group_id for episode in episodes})
