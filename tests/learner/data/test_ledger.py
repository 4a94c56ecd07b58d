"""The ledger between threads: what one reads stands still, and what two write is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from broker.protocol.messages import Publication
from buffer.operations.values import StaleMask
from buffer.record.episode import PolicyVersion
from configs.worker import Worker
from tests.learner.support.tiny_run import new_ledger

GROUPS = 1000


@pytest.fixture
def _threads_take_turns() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


def test_facts_that_were_read_never_change() -> None:
    ledger = new_ledger(1)
    ledger.ask_again([0, 1])
    ledger.create([5])
    ledger.hold(1, [2], [9], StaleMask(1, 2, 3))
    ledger.open_round(0)
    before, copy = ledger.facts, repr(ledger.facts)
    iterators = [iter(before.second_tries), iter(before.batches), iter(before.open_rounds)]

    ledger.ask_again([3])
    ledger.create([6, 7])
    ledger.hold(2, [4])
    ledger.advance(1)
    ledger.checkpoint(1)
    ledger.close_round(0)
    ledger.open_round(1)
    published = Publication(PolicyVersion(1, 1), digest="d", endpoint="e", public_key="k")
    ledger.publish(published)

    assert repr(before) == copy
    assert [list(iterator) for iterator in iterators] == [[5], [1], [0]]
    assert ledger.facts.asked_again == {0: 5, 1: 6, 3: 7}
    assert ledger.facts.checkpointed == {2}
    assert (ledger.facts.batches, ledger.facts.reused) == ({2: (4,)}, {2: ()})
    assert (before.masks, ledger.facts.masks) == ({1: StaleMask(1, 2, 3)}, {2: None})
    assert (ledger.facts.step, ledger.facts.reach, ledger.facts.open_rounds) == (1, 8, {1})
    assert ledger.facts.publication == published


@pytest.mark.usefixtures("_threads_take_turns")
def test_what_recovery_reads_is_whole_while_the_feeder_writes() -> None:
    ledger = new_ledger(1)
    ledger.ask_again(range(GROUPS))

    def feed() -> None:
        for group in range(GROUPS, 2 * GROUPS):
            ledger.create([group])

    feeder = Worker(feed, name="feeder").start()
    while feeder.is_alive:
        assert len(ledger.facts.asked_again) == GROUPS
    feeder.join()


@pytest.mark.usefixtures("_threads_take_turns")
def test_no_write_of_another_thread_is_lost() -> None:
    ledger = new_ledger(1)

    def feed() -> None:
        for group in range(GROUPS, 2 * GROUPS):
            ledger.create([group])

    feeder = Worker(feed, name="feeder").start()
    for group in range(GROUPS):
        ledger.ask_again([group])
    feeder.join()

    facts = ledger.facts
    assert facts.asked_again.keys() == set(range(GROUPS))
    assert facts.reach == 2 * GROUPS
