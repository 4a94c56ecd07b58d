"""Tasks as pure functions of their ids, and how many the feeder creates."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from msgspec import structs

from broker.protocol.codec import decode_spec
from buffer import operations
from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import ClaimCounts, EvalCounts, Stats
from buffer.store import Store
from configs.settings import BufferSettings, RunSettings
from learner.data.curriculum import (
    Feeder,
    environment_by_group,
    eval_task,
    eval_task_id,
    training_task,
    units_to_create,
)
from learner.data.retrying_store import RetryingStore
from tests.learner.support.tiny_run import begin_run, new_ledger

RUN = RunSettings(model="m", seed=3, group_size=4, steps=10, eval_episodes=5)
EMPTY = Stats(
    state="RUNNING",
    lineage=1,
    version=0,
    committed_step=0,
    hashes={},
    created=0,
    ready=0,
    leased=0,
    buffered=0,
    claimed=0,
    committed=0,
    dropped={},
    dead=0,
    cancelled=0,
    new_units=0,
    open_units=0,
    buffered_units=0,
    claims=(),
    eval=EvalCounts(0, 0, 0, 0),
)


def test_a_task_is_a_pure_function_of_seed_and_id() -> None:
    assert training_task(RUN, 17) == training_task(RUN.model_copy(), 17)
    assert training_task(RUN, 17).seed == 2007669142  # a resumed run must give what it gave before
    assert training_task(RUN.model_copy(update={"seed": 4}), 17).seed != training_task(RUN, 17).seed


def test_members_of_a_group_share_item_and_seed() -> None:
    members = {training_task(RUN, task_id) for task_id in range(8, 12)}

    assert {(task.group_id, task.index, task.temperature) for task in members} == {(2, 2, 1.0)}
    assert len(members) == 1
    assert training_task(RUN, 12).seed != training_task(RUN, 11).seed


def test_every_evaluation_asks_the_same_greedily_under_new_ids() -> None:
    rounds = [(lineage, step) for lineage in (1, 2) for step in range(11)]
    ids = [eval_task_id(RUN, *round_, index) for round_ in rounds for index in range(5)]

    assert len(set(ids)) == len(ids)
    assert min(ids) >= EVAL_BASE
    first, second = eval_task(RUN, 3, ids[0]), eval_task(RUN, 3, ids[1])
    assert structs.replace(first, group_id=0) == structs.replace(second, group_id=0)
    assert (first.index, first.temperature, first.purpose) == (3, 0.0, "eval")


def test_a_second_try_is_of_the_environment_of_its_prompt() -> None:
    run = RunSettings(
        model="m", environments=[{"environment": "calculator"}, {"environment": "reasoning_gym"}]
    )
    ledger = new_ledger(1)
    name = environment_by_group(run, ledger)
    first = {name(group): group for group in range(20)}
    assert set(first) == {"calculator", "reasoning_gym"}

    for dropped in first.values():
        ledger.ask_again([dropped])
    assigned = ledger.create([1000, 1001])

    assert {name(dropped): name(group) for dropped, group in assigned.items()} == {
        each: each for each in first
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 6),  # nothing there: fill up what should be waiting
        ({"new_units": 4}, 2),
        ({"new_units": 6}, 0),
        ({"version": 9}, 2),  # the last batch needs two more
        ({"version": 9, "open_units": 1}, 1),
        ({"version": 9, "buffered_units": 1, "open_units": 1}, 0),
        ({"version": 9, "claims": (ClaimCounts(10, 2, True, 1),)}, 0),
        ({"version": 9, "claims": (ClaimCounts(9, 2, True, 1),)}, 2),  # trained already
        ({"version": 10}, 0),
    ],
)
def test_no_more_units_are_created_than_the_run_needs(
    changes: dict[str, object], expected: int
) -> None:
    stats = replace(EMPTY, **changes)  # type: ignore[arg-type]

    assert units_to_create(stats, steps=10, units_per_batch=2, ahead=6) == expected


def test_the_feeder_fills_up_and_a_resumed_one_creates_nothing_twice(redis_url: str) -> None:
    store, run = Store(redis_url, RUN.name), RUN.model_copy(update={"groups_per_batch": 2})
    begin_run(store, run)
    patient = RetryingStore(store)
    lineage = store.run(operations.begin_lineage(0, 0))
    assert lineage is not None
    feeder = Feeder(patient, run, BufferSettings(), ledger=new_ledger(lineage), cursor=0)

    assert feeder.feed() == 13  # twice the cap of (2 + 1) * 2, and one
    assert feeder.feed() == 0
    assert (feeder.cursor, store.run(operations.stats()).created) == (13, 52)

    resumed = Feeder(patient, run, BufferSettings(), ledger=new_ledger(lineage), cursor=4)
    assert resumed.feed() == 0
    store.close()


def test_the_prompt_of_a_dropped_group_is_asked_again_once_under_a_new_id(redis_url: str) -> None:
    store, run = Store(redis_url, RUN.name), RUN.model_copy(update={"groups_per_batch": 1})
    begin_run(store, run)
    lineage = store.run(operations.begin_lineage(0, 0))
    assert lineage is not None
    ledger = new_ledger(lineage)
    ledger.ask_again([1, 0])
    feeder = Feeder(RetryingStore(store), run, BufferSettings(), ledger=ledger, cursor=4)

    assert feeder.feed() == 7
    lease = store.run(operations.lease("a", ttl_ms=60_000, n=12, version=(lineage, 0)))

    specs = {task.task_id // 4: decode_spec(task.spec) for task in lease.tasks}
    assert [specs[group].index for group in (4, 5, 6)] == [1, 0, 6]
    assert [specs[group].group_id for group in (4, 5, 6)] == [4, 5, 6]
    assert specs[4].seed == training_task(RUN, 4).seed
    ledger.ask_again([4, 6])
    assert list(ledger.facts.waiting) == [6]
    ledger.create([4, 11])  # a create that failed is repeated with more groups
    assert ledger.facts.second_tries == {4: 1, 5: 0, 11: 6}
    store.close()


class BrokenStore:
    """A store that fails as no store of ours should: a defect, which is no `NyalaError`."""

    def run(self, operation: object) -> None:
        """Fail."""
        raise RuntimeError("a defect")


def test_whatever_ends_the_feeder_is_raised_to_those_who_wait_for_its_tasks() -> None:
    store = cast("RetryingStore", BrokenStore())
    feeder = Feeder(store, RUN, BufferSettings(), ledger=new_ledger(1), cursor=0)

    feeder.start()
    feeder.stop()

    with pytest.raises(RuntimeError, match="a defect"):
        feeder.check_feed_thread()
