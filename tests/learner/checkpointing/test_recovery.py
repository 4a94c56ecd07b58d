"""What the learner re-asserts in a store that knows less, fact by fact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis
from structlog.testing import capture_logs

from broker.protocol.messages import Publication
from buffer import operations
from buffer.operations.values import StaleMask
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from configs.errors import CheckpointError, LostLineage
from configs.settings import Settings
from learner.checkpointing.folders import read_lineages, write_lineages
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.recovery import recover, register_run
from learner.checkpointing.resume import _begin_lineage, _warn_of_gaps
from learner.data.curriculum import training_tasks
from learner.data.ledger import LedgerSnapshot, as_ranges, from_ranges
from learner.data.retrying_store import RetryingStore
from learner.reporting.metrics import Totals
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import answer_leases, tiny_settings

OWNER = "this learner"
WEIGHTS = Publication(PolicyVersion(3, 2), digest="d", endpoint="tcp://here:1", public_key="k")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path, run={"eval_every": 2, "eval_episodes": 3})


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    with Store(redis_url, "tiny") as opened:
        yield opened


def facts_of_step_2(**changes: object) -> LedgerSnapshot:
    """Lineage 3 stands at step 2; its checkpoint is of step 1; group 2 was dropped."""
    facts: dict[str, object] = {
        "lineage": 3,
        "owner": OWNER,
        "lineages": {1: 0, 2: 0, 3: 1},
        "step": 2,
        "checkpoint_step": 1,
        "checkpointed": frozenset({0, 1}),
        "reach": 7,
        "batches": {2: (4, 3)},
    }
    return LedgerSnapshot(**(facts | changes))  # type: ignore[arg-type]  # a table of its own fields


def put_right(store: Store, settings: Settings, facts: LedgerSnapshot) -> None:
    recover(store, store.server_run_id(), run=settings.run, buffer=settings.buffer, facts=facts)


def filled(store: Store, settings: Settings, *, groups: int, lineage: int = 1) -> None:
    """Enter the run as an older learner did, with finished groups in the buffer."""
    register_run(store, settings.run, settings.buffer)
    for expected in range(lineage):
        store.run(operations.begin_lineage(expected, 0, owner=OWNER))
    store.run(operations.create(lineage, training_tasks(settings.run, range(groups), {})))
    version = PolicyVersion(lineage, 0)
    while answer_leases(
        store,
        version,
        lambda i, spec: make_episode(i, group_id=spec.group_id, versions=[(version, 0)]),
    ):
        pass


def test_a_wiped_store_learns_all_that_the_learner_knows(store: Store, settings: Settings) -> None:
    facts = facts_of_step_2(
        publication=WEIGHTS, open_rounds=frozenset({2}), second_tries={6: 1}, waiting=(2,)
    )

    put_right(store, settings, facts)

    stats = store.run(operations.stats())
    assert (stats.state, stats.lineage, stats.version, stats.committed_step) == ("RUNNING", 3, 2, 1)
    assert (stats.committed, stats.claimed, stats.created) == (2 * 4, 2 * 4, 7 * 4)
    assert stats.new_units == 3, "groups 2, 5 and 6 are made again"
    assert stats.eval.ready == 3
    assert store.run(operations.lineages()) == {1: 0, 2: 0, 3: 1}
    assert store.run(operations.recreations()) == {1: 6, 2: None}
    found = store.run(operations.publication())
    assert found is not None
    assert (found.version, found.fields["endpoint"]) == (WEIGHTS.version, WEIGHTS.endpoint)


def test_recovery_may_be_repeated(store: Store, settings: Settings) -> None:
    put_right(store, settings, facts_of_step_2())
    once = store.run(operations.stats())

    put_right(store, settings, facts_of_step_2())

    assert store.run(operations.stats()) == once


def test_a_batch_held_in_memory_is_claimed_again(store: Store, settings: Settings) -> None:
    mask = StaleMask(3, 1, 100)
    batches = {2: (4, 3), 3: (5, 6)}
    put_right(store, settings, facts_of_step_2(batches=batches, masks={2: None, 3: mask}))

    claim = store.run(operations.claim(3, 3, 2))

    assert claim.sealed
    assert (claim.mask, store.run(operations.claim(3, 2, 2)).mask) == (mask, None)
    assert [unit.group_id for unit in claim.units] == [5, 6]
    assert store.run(operations.stats()).version == 2, "it is not trained yet"


def test_what_an_old_claim_holds_besides_the_trained_batch_returns_to_the_buffer(
    store: Store, settings: Settings
) -> None:
    filled(store, settings, groups=5)
    for k in (1, 2):
        store.run(operations.claim(1, k, 2))  # {0, 1} and {2, 3}, before 2 was dropped

    put_right(store, settings, facts_of_step_2(reach=5))

    stats = store.run(operations.stats())
    assert stats.accounted == stats.created == 5 * 4
    assert stats.buffered_units == 1, "group 2"
    [claim] = stats.claims
    assert (claim.k, claim.units, claim.sealed) == (2, 2, True)
    assert store.run(operations.audit()) == []


def test_an_old_claim_of_a_committed_batch_is_committed_as_it_was_trained(
    store: Store, settings: Settings
) -> None:
    filled(store, settings, groups=5)
    store.run(operations.claim(1, 1, 3))  # {0, 1, 2}, before 2 was dropped from batch 1
    store.run(operations.seal(1, 1))

    put_right(store, settings, facts_of_step_2(reach=5))

    stats = store.run(operations.stats())
    assert stats.committed == 2 * 4
    assert stats.buffered_units == 1, "group 2"


def test_a_group_whose_commit_is_lost_beside_one_that_is_kept_is_committed_again(
    store: Store, settings: Settings
) -> None:
    filled(store, settings, groups=5)
    store.run(operations.claim(1, 1, 1))  # group 0
    store.run(operations.seal(1, 1))
    store.run(operations.advance(1, 1))
    assert store.run(operations.commit(1, 1)) == 4

    put_right(store, settings, facts_of_step_2(reach=5))

    stats = store.run(operations.stats())
    assert stats.committed == 2 * 4
    assert stats.accounted == stats.created == 5 * 4


def test_a_learner_whose_lineage_another_began_is_lost(store: Store, settings: Settings) -> None:
    filled(store, settings, groups=1, lineage=3)

    with pytest.raises(LostLineage):
        put_right(store, settings, facts_of_step_2(owner="somebody else"))
    store.run(operations.begin_lineage(3, 0))
    with pytest.raises(LostLineage):
        put_right(store, settings, facts_of_step_2())


def test_an_older_lineage_is_lost_to_the_learner_whose_lineage_was_restored(
    store: Store, settings: Settings
) -> None:
    filled(store, settings, groups=1, lineage=2)

    put_right(store, settings, facts_of_step_2())

    with pytest.raises(LostLineage):
        store.run(operations.claim(2, 3, 2))


def test_evaluation_rounds_that_have_ended_do_not_open_again(
    store: Store, settings: Settings, redis_url: str
) -> None:
    put_right(store, settings, facts_of_step_2(open_rounds=frozenset({0, 2})))
    assert store.run(operations.stats()).eval.ready == 2 * 3

    put_right(store, settings, facts_of_step_2(open_rounds=frozenset({2})))

    assert store.run(operations.stats()).eval.ready == 3
    with redis.Redis.from_url(redis_url) as client:
        assert client.zcard("nyala:{tiny}:rounds") == 1


def _state(step: int, lineage: int) -> LearnerState:
    return LearnerState("tiny", "h", step, lineage, cursor=0, trained=(), totals=Totals())


def test_a_learner_that_another_was_faster_than_begins_no_lineage(
    store: Store, settings: Settings
) -> None:
    filled(store, settings, groups=0)
    before = store.run(operations.stats())
    assert store.run(operations.begin_lineage(1, 0, owner="the other")) == 2

    with pytest.raises(LostLineage, match="got another that has just taken it over"):
        _begin_lineage(settings.run, cast("RetryingStore", store), before, _state(0, 1), None)

    assert read_lineages(settings.run.folder) == {}


def test_a_lineage_of_an_empty_store_creates_from_the_first_group(
    store: Store, settings: Settings
) -> None:
    register_run(store, settings.run, settings.buffer)

    start = _begin_lineage(
        settings.run,
        cast("RetryingStore", store),
        store.run(operations.stats()),
        _state(0, 0),
        None,
    )

    assert start.reach == 0


@pytest.mark.parametrize(
    ("lineage", "step", "said"),
    [(3, 1, ""), (4, 1, "THE STORE IS OLDER"), (3, 0, "RESUMING BEFORE THE LAST COMMIT")],
)
def test_a_gap_between_store_and_checkpoint_is_reported_and_nothing_else(
    store: Store, settings: Settings, lineage: int, step: int, said: str
) -> None:
    put_right(store, settings, facts_of_step_2())

    with capture_logs() as logs:
        _warn_of_gaps(store.run(operations.stats()), _state(step, lineage))

    assert len(logs) == bool(said)
    assert all(said in log["event"] for log in logs)


def test_groups_travel_as_ranges() -> None:
    assert as_ranges({4, 0, 1, 2, 7, 8}) == [(0, 3), (4, 5), (7, 9)]
    assert from_ranges(as_ranges({4, 0, 1, 2, 7, 8})) == {4, 0, 1, 2, 7, 8}
    assert as_ranges(set()) == []


def test_lineages_are_remembered_beside_the_store(tmp_path: Path) -> None:
    assert read_lineages(tmp_path / "run") == {}

    write_lineages(tmp_path / "run", {1: 0, 2: 50})

    assert read_lineages(tmp_path / "run") == {1: 0, 2: 50}
    (tmp_path / "run" / "lineages.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must map lineages to steps"):
        read_lineages(tmp_path / "run")
