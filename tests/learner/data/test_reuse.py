"""Groups that are trained again, against a real store: choice, number of uses, crashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.operations.values import NewTask
from buffer.record.episode import Episode, PolicyVersion
from buffer.store import Store
from configs.settings import Settings
from learner.checkpointing.recovery import recover, register_run
from learner.data import reuse
from learner.data.claims import ClaimedBatch, Claims
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore
from learner.reporting.metrics import Totals, batch_figures
from tests.learner.support.made_claims import make_claims
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import answer_leases, new_ledger, tiny_settings

KEPT = {"capacity": 1000, "fraction": 0.5, "max_reuse": 2}


@dataclass(slots=True)
class Bench:
    """A learner that trains, checkpoints and commits each batch, and actors that feed it."""

    store: Store
    settings: Settings
    ledger: Ledger
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.live(self.ledger)

    def live(self, ledger: Ledger) -> None:
        """Begin a life."""
        self.ledger = ledger
        self.claims = make_claims(
            RetryingStore(self.store), self.settings, ledger=ledger, vocabulary=32
        )

    def fill(self, k: int, *, spread: float = 1.0) -> None:
        """Have actors make the new groups of batch k under the newest weights."""
        size, groups = self.settings.run.group_size, self.settings.run.groups_per_batch
        ids = range((k - 1) * groups * size, k * groups * size)
        spec = encode_spec(TaskSpec(0, 0, 0, "train", 1.0))
        lineage, version = self.ledger.lineage, (self.ledger.lineage, k - 1)
        self.store.run(operations.create(lineage, [NewTask(i, i // size, spec) for i in ids]))

        def answer(task: int, _spec: TaskSpec) -> Episode:
            reward = spread * (1 + task // size % groups) * (task % 2)
            span = (PolicyVersion(*version), 0)
            return make_episode(task, group_id=task // size, versions=[span], reward=reward)

        assert answer_leases(self.store, version, answer) == len(ids)

    def seal(self, k: int) -> ClaimedBatch:
        """Seal batch k."""
        batch = self.claims.poll(k)
        assert batch is not None
        return batch

    def train(self, k: int) -> ClaimedBatch:
        """Make, seal, train, checkpoint and commit batch k."""
        self.fill(k)
        batch = self.seal(k)
        self.ledger.advance(k)
        self.store.run(operations.advance(self.ledger.lineage, k))
        self.ledger.checkpoint(k)
        self.store.run(operations.commit(self.ledger.lineage, k))
        return batch


def make_bench(url: str, folder: Path, replay: Mapping[str, object]) -> Bench:
    """Begin a run with these settings of replay."""
    settings = tiny_settings(folder, replay=replay, learner={"checkpoint_every": 1})
    store = Store(url, settings.run.name)
    register_run(store, settings.run, settings.buffer)
    lineage = store.run(operations.begin_lineage(0, 0, owner="owner"))
    assert lineage == 1
    return Bench(store, settings, new_ledger(lineage))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "TRIM_EVERY_S", 0.0)


@pytest.fixture
def bench(redis_url: str, tmp_path: Path) -> Iterator[Bench]:
    bench = make_bench(redis_url, tmp_path, KEPT)
    yield bench
    bench.store.close()


def groups_of(batch: ClaimedBatch) -> list[int]:
    """The groups of a batch, new ones first."""
    return list(dict.fromkeys(episode.group_id for episode in batch.episodes))


def test_a_batch_gets_groups_that_were_trained_before_on_top_of_its_own(bench: Bench) -> None:
    first = bench.train(1)
    second = bench.train(2)

    assert first.uses == {}
    assert second.uses == {0: 1, 1: 1}
    assert groups_of(second)[:2] == [2, 3] and set(groups_of(second)[2:]) == {0, 1}
    stats = bench.store.run(operations.stats())
    assert stats.committed == stats.created == stats.accounted == 16


def test_a_group_is_trained_again_only_so_often(bench: Bench) -> None:
    times = [bench.train(k).uses for k in range(1, 8)]

    trained_again = [group for uses in times for group in uses]
    assert max(trained_again.count(group) for group in trained_again) == 2
    assert all(count in (1, 2) for uses in times for count in uses.values())


def test_without_capacity_nothing_is_kept(redis_url: str, tmp_path: Path) -> None:
    bench = make_bench(redis_url, tmp_path, {})
    assert bench.train(1).uses == bench.train(2).uses == {}

    assert bench.store.run(operations.stats()).kept_units == 0
    bench.store.close()


def test_what_was_kept_goes_when_reuse_is_switched_off(bench: Bench) -> None:
    bench.train(1)
    bench.settings = tiny_settings(bench.settings.run.directory)
    bench.live(bench.ledger)

    assert bench.train(2).uses == {}

    assert bench.store.run(operations.stats()).kept_units == 0


def test_a_sealed_batch_reuses_the_same_groups_after_a_crash(bench: Bench) -> None:
    bench.train(1)
    bench.fill(2)
    sealed = bench.seal(2)

    lineage = bench.store.run(operations.begin_lineage(1, 1))
    assert lineage == 2
    bench.live(new_ledger(lineage, {1: 0, 2: 1}))
    again = bench.seal(2)

    assert again.is_replay and again.uses == sealed.uses
    assert [e.task_id for e in again.episodes] == [e.task_id for e in sealed.episodes]


def test_groups_that_are_too_far_behind_are_never_trained(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(redis_url, tmp_path, {**KEPT, "max_reuse": 9, "max_lag": 2})
    # Not even where the store did not forget them.
    monkeypatch.setattr(bench.claims._reuse, "keep_within_bounds", lambda _step: None)

    uses = [bench.train(k).uses for k in range(1, 9)]

    for k, reused in enumerate(uses, 1):
        for group in reused:
            assert k - 1 - group // 2 <= 2, f"group {group} of batch {group // 2 + 1} in {k}"
    assert sum(map(len, uses)) > 6
    bench.store.close()


def test_the_store_forgets_what_is_too_old_or_too_much(redis_url: str, tmp_path: Path) -> None:
    bench = make_bench(redis_url, tmp_path, {**KEPT, "capacity": 8, "max_reuse": 9})

    for k in range(1, 6):
        bench.train(k)
        bench.claims.poll(k + 1)
        stats = bench.store.run(operations.stats())
        assert stats.kept_units + stats.reused_units <= 2
    bench.store.close()


def test_prioritised_by_advantage_ranks_groups_by_how_far_rewards_lie_apart(
    redis_url: str, tmp_path: Path
) -> None:
    bench = make_bench(redis_url, tmp_path, {**KEPT, "sampling": "prioritised"})
    bench.train(1)

    order = bench.store._client.zrange(f"{run_prefix('tiny')}:replay", 0, -1)

    assert order == [b"1", b"0"]  # rewards 2 apart, and 1
    bench.store.close()


@pytest.mark.parametrize("sampling", ["newest", "prioritised"])
def test_by_lag_the_newest_come_first(redis_url: str, tmp_path: Path, sampling: str) -> None:
    replay = {**KEPT, "sampling": sampling, "priority": "lag", "fraction": 0.01, "max_reuse": 9}
    bench = make_bench(redis_url, tmp_path, replay)
    for k in (1, 2, 3):
        bench.train(k)

    order = bench.store._client.zrange(f"{run_prefix('tiny')}:replay", 0, -1)

    assert order[:2] == [b"4", b"5"] and order[-2:] == [b"0", b"1"]
    bench.store.close()


def test_reused_groups_are_counted_apart(bench: Bench) -> None:
    bench.train(1)
    batch = bench.train(2)

    figures = batch_figures(batch.episodes, step=2, lineage=1, lineages={1: 0}, uses=batch.uses)
    totals = Totals()
    totals.add(figures, skipped=False)

    assert (figures.groups, figures.reused_groups, figures.reused_episodes) == (4, 2, 8)
    assert (figures.reused_policy_lag_mean, figures.policy_lag_mean) == (1.0, 0.5)
    assert (figures.reuse_count_max, figures.reused_tokens) == (1, 16)
    assert (totals.episodes, totals.reused_episodes, totals.completion_tokens) == (8, 8, 16)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_store_that_lost_a_use_loses_what_it_kept(bench: Bench, forgets: bool) -> None:
    bench.train(1)
    bench.fill(2)
    assert bench.seal(2).uses
    if forgets:
        bench.store._client.zrem(f"{run_prefix('tiny')}:reused", 1)
        bench.store._client.zadd(f"{run_prefix('tiny')}:replay", {"1": 0})
    server = bench.store.server_run_id()

    recover(
        bench.store,
        server,
        run=bench.settings.run,
        buffer=bench.settings.buffer,
        facts=bench.ledger.facts,
    )

    stats = bench.store.run(operations.stats())
    assert stats.kept_units + stats.reused_units == (0 if forgets else 2)
    assert stats.accounted == stats.created
