"""With `buffer.on_stale: mask` stale tokens are context; a replay and other ranks mask the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from buffer import operations
from buffer.record.episode import Episode, PolicyVersion
from configs.settings import BufferSettings, RewardSettings
from learner.checkpointing.checkpoint import BackgroundSave
from learner.checkpointing.resume import StartState
from learner.coordinator import FollowerRank
from learner.data.batch import BatchPlan, plan_batch
from learner.data.claims import ClaimedBatch
from learner.data.policy_lag import FreshTokens
from learner.data.records import Records
from learner.model.ranks import Ranks
from tests.learner.support.claims_bench import Bench, groups_of
from tests.learner.support.tiny_run import tiny_settings

Versions = Sequence[tuple[PolicyVersion, int]]

STEP = 3  # trained by version 2: with run.max_policy_lag 1, version 0 is too old and 1 is not
OLD, AT_BOUND, NEW = (PolicyVersion(1, step) for step in range(3))


def members(*versions: Versions) -> Callable[[int], Versions]:
    """Give the members of every group these versions, in turns."""
    return lambda task_id: versions[task_id % len(versions)]


# Four members of a group: stale first tokens, wholly stale, at the bound, of today.
MIXED = members([(OLD, 0), (AT_BOUND, 2)], [(OLD, 0)], [(AT_BOUND, 0)], [(NEW, 0)])
MIXED_MASKS = [[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def settle(bench: Bench, folder: Path, on_stale: str, **tables: Mapping[str, object]) -> None:
    bench.settings = tiny_settings(folder, buffer={"on_stale": on_stale}, **tables)


def fill(bench: Bench, units: int, versions_of: Callable[[int], Versions], first: int = 0) -> None:
    """Fill the buffer as it is while batch 3 waits."""
    bench.store.run(operations.advance(bench.lineage, STEP - 1))
    version = (bench.lineage, STEP - 1)
    bench.fill(units, first=first, version=version, versions_of=versions_of, completion=[8] * 4)


def seal(bench: Bench) -> ClaimedBatch:
    batch = bench.claims().poll(STEP)
    assert batch is not None
    return batch


def masks_of(episodes: Iterable[Episode]) -> list[list[int]]:
    return [episode.completion.loss_mask.tolist() for episode in episodes]


def plan_of(bench: Bench, batch: ClaimedBatch, *, ranks: int = 1) -> BatchPlan:
    return plan_batch(
        STEP,
        batch.episodes,
        ranks=ranks,
        settings=bench.settings.algorithm,
        max_completion_tokens=8,
        microbatch_tokens=16384,
    )


def test_stale_tokens_are_masked_and_their_groups_stay(bench: Bench, tmp_path: Path) -> None:
    settle(bench, tmp_path, "mask")
    fill(bench, 2, MIXED)

    batch = seal(bench)

    assert masks_of(batch.episodes) == MIXED_MASKS * 2
    assert masks_of(batch.sampled) == [[1, 1, 1, 1]] * 8
    assert bench.stats().dropped == {}
    assert batch.tokens == FreshTokens(
        sampled=32, trained=20, masked=12, fresh=20, fresh_trained=20
    )


def test_rewards_of_stale_members_stay_in_the_baseline(bench: Bench, tmp_path: Path) -> None:
    settle(bench, tmp_path, "mask", algorithm={"advantage": "dr_grpo"})
    fill(bench, 2, MIXED)  # rewards 0, 1, 0, 1

    plan = plan_of(bench, seal(bench))

    assert [row.task_id for row in plan.rows] == [0, 2, 3, 4, 6, 7], "1 and 5 are wholly stale"
    assert [row.advantage for row in plan.rows] == [-0.5, -0.5, 0.5] * 2
    [counts] = plan.counts
    assert (counts.tokens, counts.episodes) == (20, 6), "the wholly stale members are not counted"


def test_a_group_without_a_fresh_token_is_dropped_as_stale(bench: Bench, tmp_path: Path) -> None:
    settle(bench, tmp_path, "mask")
    fill(bench, 1, members([(OLD, 0)]))
    fill(bench, 2, MIXED, first=1)
    claims = bench.claims()

    assert claims.poll(STEP) is None
    batch = claims.poll(STEP)

    assert batch is not None
    assert groups_of(batch.episodes) == [1, 2]
    assert bench.stats().dropped == {"stale": 4}
    assert batch.tokens == FreshTokens(
        sampled=48, trained=20, masked=12, fresh=20, fresh_trained=20
    )


def test_dropping_counts_the_fresh_tokens_that_go_with_their_group(
    bench: Bench, tmp_path: Path
) -> None:
    settle(bench, tmp_path, "drop")
    fill(bench, 1, MIXED)
    fill(bench, 2, members([(NEW, 0)]), first=1)
    claims = bench.claims()

    assert claims.poll(STEP) is None
    batch = claims.poll(STEP)

    assert batch is not None
    assert batch.tokens == FreshTokens(sampled=48, trained=32, masked=0, fresh=42, fresh_trained=32)
    assert batch.tokens.figures()["fresh_trained_fraction"] == 32 / 42


def test_training_stale_tokens_leaves_no_fresh_one_out(bench: Bench, tmp_path: Path) -> None:
    settle(bench, tmp_path, "train")
    fill(bench, 2, MIXED)

    tokens = seal(bench).tokens

    assert tokens == FreshTokens(sampled=32, trained=32, masked=0, fresh=20, fresh_trained=20)
    assert set(tokens.figures().values()) == {1.0, 0}


def test_the_counts_of_a_batch_begin_with_it(bench: Bench, tmp_path: Path) -> None:
    settle(bench, tmp_path, "drop")
    fill(bench, 1, members([(OLD, 0)]))
    fill(bench, 2, members([(NEW, 0)]), first=1)
    claims = bench.claims()
    assert claims.poll(STEP) is None
    first = claims.poll(STEP)
    bench.store.run(operations.advance(bench.lineage, STEP))
    bench.fill(2, first=3, version=(bench.lineage, STEP), completion=[8] * 4)

    second = claims.poll(STEP + 1)

    assert first is not None and second is not None
    assert (first.tokens.sampled, second.tokens.sampled) == (48, 32)


@pytest.mark.parametrize("later", ["mask", "drop", "train"])
def test_a_replay_masks_what_was_masked_when_the_batch_was_sealed(
    bench: Bench, tmp_path: Path, later: str
) -> None:
    settle(bench, tmp_path, "mask")
    fill(bench, 2, MIXED)
    first = seal(bench)
    plan = plan_of(bench, first).encode()

    settle(bench, tmp_path, later, run={"max_policy_lag": 0})
    # Of a branch that was abandoned at 1: counted now, a token of version 2 has lag 2.
    replay = bench.restart(1).poll(STEP)

    assert replay is not None and replay.is_replay
    assert masks_of(replay.episodes) == MIXED_MASKS * 2
    assert plan_of(bench, replay).encode() == plan
    assert bench.ledger.facts.masks == {STEP: first.mask}, "a rewound store gets it back"
    assert replay.tokens == first.tokens, "counted by the bound and lineage of the mask"


def test_a_batch_that_was_sealed_without_a_mask_is_replayed_without_one(
    bench: Bench, tmp_path: Path
) -> None:
    settle(bench, tmp_path, "train")
    fill(bench, 2, MIXED)
    seal(bench)

    settle(bench, tmp_path, "mask")
    replay = bench.restart(1).poll(STEP)

    assert replay is not None
    assert masks_of(replay.episodes) == [[1, 1, 1, 1]] * 8


def test_other_ranks_mask_the_same_tokens(bench: Bench, tmp_path: Path) -> None:
    settle(bench, tmp_path, "mask")
    fill(bench, 2, MIXED)
    batch = seal(bench)
    plan = replace(plan_of(bench, batch, ranks=3), mask=batch.mask)
    records = Records(bench.patient, bench.settings.run, BufferSettings(), RewardSettings())
    start = cast("StartState", SimpleNamespace(lineages=bench.ledger.lineages))
    masks: dict[int, list[int]] = {}

    for rank in range(3):
        ranks = cast("Ranks", SimpleNamespace(broadcast=lambda _: plan.encode(), data_rank=rank))
        follower = FollowerRank(ranks, records, start, cast("BackgroundSave", None))
        received = follower.next_batch(STEP, 16384)
        assert received is not None and received[0] == plan
        masks |= {e.task_id: e.completion.loss_mask.tolist() for e in received[1]}

    trained = {n: mask for n, mask in enumerate(MIXED_MASKS * 2) if any(mask)}
    assert masks == trained, "episodes without a fresh token are not fetched"


def test_reused_groups_are_masked_by_the_bound_of_reuse(bench: Bench, tmp_path: Path) -> None:
    replay = {"capacity": 64, "fraction": 0.67, "max_reuse": 2, "max_lag": 3}
    settle(bench, tmp_path, "mask", replay=replay)
    fill(bench, 2, MIXED)
    claims = bench.claims()

    def train_and_fill(step: int, first: int) -> ClaimedBatch:
        """Train and commit the batch before `step`, and seal this one."""
        bench.ledger.advance(step - 1)
        bench.store.run(operations.advance(bench.lineage, step - 1))
        bench.ledger.checkpoint(step - 1)
        bench.store.run(operations.commit(bench.lineage, step - 1))
        bench.fill(2, first=first, version=(bench.lineage, step - 1), completion=[8] * 4)
        batch = claims.poll(step)
        assert batch is not None
        return batch

    assert claims.poll(STEP) is not None
    at_bound = train_and_fill(STEP + 1, first=2)
    beyond = train_and_fill(STEP + 2, first=4)

    assert (set(at_bound.uses), set(beyond.uses)) == ({0, 1}, {0, 1, 2, 3})
    again = [[e for e in batch.episodes if e.group_id < 2] for batch in (at_bound, beyond)]
    assert masks_of(again[0]) == [[1, 1, 1, 1]] * 8
    assert masks_of(again[1]) == MIXED_MASKS * 2
    assert beyond.tokens == FreshTokens(32, 32, 0, 32, 32), "reused groups are not counted"
