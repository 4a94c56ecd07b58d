"""One rank without FSDP2: the results, the files and the published bytes of one with it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.settings import CriticSettings, LearnerSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.tensors import Shards
from learner.model.policy import Policy, probe_scores
from learner.model.ranks import Ranks
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import BatchOutcome
from tests.learner.support.adapted_policy import SETTINGS, adapted_policy, published_bytes
from tests.learner.support.made_critic import HEAD, MODEL, make_pair, train_pair
from tests.learner.support.ranks.forced_shards import forced_shards
from tests.learner.support.ranks.one_of_two_ranks import STATE, new_policy, train, whole_moments
from tests.learner.support.ranks.one_of_two_ranks import whole_parameters as whole

KINDS = {
    "adamw": LearnerSettings(),
    "muon": LearnerSettings(optimizer="muon"),
    "adamw8bit": LearnerSettings(optimizer="adamw8bit"),
    "lora": SETTINGS,
}
PROBE, NUMBERS = (4, 9, 3, 17), (0.1, 0.5, 0.9)


class Found(NamedTuple):
    """What some batches made."""

    outcomes: list[tuple[float, BatchOutcome]]
    tensors: list[Tensor]
    published: bytes
    probe: tuple[list[float], list[int]]


def _make(kind: str, ranks: Ranks, *, is_sharded: bool) -> tuple[Policy, ScheduledOptimizer]:
    make = adapted_policy if kind == "lora" else new_policy
    with forced_shards() if is_sharded else nullcontext():
        policy, optimizer = make(ranks, settings=KINDS[kind])
    assert all(isinstance(p, DTensor) == is_sharded for p in policy.parameters())
    return policy, optimizer


def _train(policy: Policy, optimizer: ScheduledOptimizer, steps: range, ranks: Ranks) -> Found:
    trained = [train(policy, optimizer, step, ranks) for step in steps]
    return Found(
        [(each.loss, each.outcome) for each in trained],
        [t.clone() for t in (*whole(policy), *whole_moments(optimizer))],
        published_bytes(policy.causal_lm),
        probe_scores(policy, PROBE, NUMBERS),
    )


def _assert_alike(plain: Found, sharded: Found) -> None:
    assert plain.outcomes == sharded.outcomes
    assert all(torch.equal(a, b) for a, b in zip(plain.tensors, sharded.tensors, strict=True))
    assert (plain.published, plain.probe) == (sharded.published, sharded.probe)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_without_fsdp_as_with_it_to_the_bit(ranks: Ranks, kind: str) -> None:
    plain, sharded = (
        _train(*_make(kind, ranks, is_sharded=is_sharded), range(1, 4), ranks)
        for is_sharded in (False, True)
    )

    _assert_alike(plain, sharded)
    assert all(outcome.grad_norm > 0 for _, outcome in plain.outcomes)


@pytest.mark.parametrize("settings", [HEAD, MODEL], ids=["head", "model"])
def test_a_critic_on_one_rank_trains_without_fsdp_as_with_it_to_the_bit(
    ranks: Ranks, settings: CriticSettings, tmp_path: Path
) -> None:
    found = []
    for name in ("plain", "sharded"):
        with forced_shards() if name == "sharded" else nullcontext():
            pair = make_pair(settings, tmp_path / name, ranks)
        for step in (1, 2, 3):
            train_pair(pair, step, ranks, microbatch_tokens=24)
        found.append([*pair.parameters(), *pair.moments()])

    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("was_sharded", [True, False])
def test_a_checkpoint_passes_between_both_to_the_bit(
    ranks: Ranks, tmp_path: Path, kind: str, *, was_sharded: bool
) -> None:
    policy, optimizer = _make(kind, ranks, is_sharded=was_sharded)
    _train(policy, optimizer, range(1, 3), ranks)
    checkpoints = Checkpoints(tmp_path, keep=1, ranks=ranks)
    path = checkpoints.save(STATE, policy, optimizer)
    expected = _train(policy, optimizer, range(3, 5), ranks)

    other = _make(kind, ranks, is_sharded=not was_sharded)
    checkpoints.load(path, *other)
    again = Checkpoints(tmp_path / "again", keep=1, ranks=ranks).save(STATE, *other)

    _assert_alike(_train(*other, range(3, 5), ranks), expected)
    saved, saved_again = Shards(path), Shards(again)
    assert (saved.shapes, saved.dtypes) == (saved_again.shapes, saved_again.dtypes)
    for name in saved.shapes:
        assert torch.equal(saved.read_whole(name), saved_again.read_whole(name))
