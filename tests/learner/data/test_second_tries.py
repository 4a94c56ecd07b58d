"""Prompts of groups that were too old: asked once more, also when the learner dies in between."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import redis

from broker.protocol.codec import decode_spec
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from configs.settings import Settings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.resume import take_over
from learner.data.curriculum import Feeder
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore
from tests.learner.support.made_claims import make_claims
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import answer_leases, tiny_settings

STALE_AT = 3  # the batch for which weights of step 0 are too old


class NoCheckpoint:
    """A learner that dies before its first checkpoint."""

    def newest(self) -> None:
        """Find none."""


def begin_life(store: Store, settings: Settings) -> tuple[Ledger, Feeder]:
    patient = RetryingStore(store)
    start = take_over(settings.run, settings.buffer, patient, cast("Checkpoints", NoCheckpoint()))
    ledger = start.ledger()
    cursor = start.state.cursor
    return ledger, Feeder(patient, settings.run, settings.buffer, ledger=ledger, cursor=cursor)


def drop_two_groups(store: Store, settings: Settings, ledger: Ledger) -> None:
    """Have the groups 0 and 1 finished with weights that are too old when they are claimed."""
    version = PolicyVersion(ledger.lineage, 0)
    answer_leases(
        store,
        version,
        lambda i, spec: make_episode(i, group_id=spec.group_id, versions=[(version, 0)]),
    )
    store.run(operations.advance(ledger.lineage, STALE_AT - 1))
    claims = make_claims(RetryingStore(store), settings, ledger=ledger, vocabulary=32)
    assert claims.poll(STALE_AT) is None
    assert claims.dropped.units == {"stale": 2}


def asked(url: str, group: int) -> int:
    """Which prompt a group that nobody has begun asks, by the spec of its first task."""
    with redis.Redis.from_url(url) as client:
        spec = client.lindex(f"{run_prefix('tiny')}:s:{group}", 0)
    assert isinstance(spec, bytes)
    return decode_spec(spec).index


def test_prompts_that_waited_when_the_learner_died_are_asked_by_the_next_life(
    redis_url: str, tmp_path: Path
) -> None:
    settings = tiny_settings(tmp_path)
    with Store(redis_url, "tiny") as store:
        ledger, feeder = begin_life(store, settings)
        feeder.feed()
        known = feeder.cursor
        drop_two_groups(store, settings, ledger)

        ledger, feeder = begin_life(store, settings)  # of the first one's memory nothing is left
        assert list(ledger.facts.waiting) == [0, 1]
        while feeder.cursor < known + 2:
            assert feeder.feed()

        assert [asked(redis_url, group) for group in range(known - 1, known + 2)] == [
            known - 1,  # the store had it already
            0,
            1,
        ]


def test_no_life_asks_a_prompt_a_third_time(redis_url: str, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    with Store(redis_url, "tiny") as store:
        ledger, _ = begin_life(store, settings)
        store.run(operations.recreate_dropped(ledger.lineage, {3: 9, 4: None}))

        ledger, _ = begin_life(store, settings)

        assert ledger.facts.second_tries == {9: 3}
        assert ledger.ask_again([3, 4, 9, 5]) == [5]
        assert ledger.create([9, 10]) == {4: 10}
