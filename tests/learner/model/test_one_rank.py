"""One rank without FSDP2: the results, the files and the published bytes of one with it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.settings import CriticSettings, LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.tensors import Shards
from learner.model.activations import Kept
from learner.model.lora import adapt, begin_adapters
from learner.model.policy import Policy, probe_scores, release, rounded_logprobs, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import layers_of, local_of
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import BatchOutcome
from tests.learner.support.adapted_policy import (
    PACKED,
    SETTINGS,
    WIDE,
    adapted_policy,
    published_bytes,
)
from tests.learner.support.made_critic import HEAD, MODEL, make_pair, train_pair
from tests.learner.support.random_models import ARCHITECTURES, make_random_model
from tests.learner.support.ranks.forced_shards import forced_shards
from tests.learner.support.ranks.one_of_two_ranks import STATE, new_policy, train, whole_moments
from tests.learner.support.ranks.one_of_two_ranks import whole_parameters as whole
from tests.learner.support.tiny_policy import constant_rate, tiny_causal_lm

NARROW = "bfloat16", "bfloat16, full", "bfloat16, adapters", "bfloat16, base", "bfloat16, 4 bits"
KINDS = {
    **dict.fromkeys(NARROW, LearnerSettings()),
    "bfloat16, adapters": SETTINGS,
    "bfloat16, base": SETTINGS.model_copy(update={"base_dtype": "bfloat16"}),
    "bfloat16, 4 bits": PACKED,
    "adamw": LearnerSettings(),
    "muon": LearnerSettings(optimizer="muon"),
    "adamw8bit": LearnerSettings(optimizer="adamw8bit"),
    "lora": SETTINGS,
    "lora, 4 bits": PACKED,
}
PROBE, NUMBERS = (4, 9, 3, 17), (0.1, 0.5, 0.9)


class Found(NamedTuple):
    """What some batches made."""

    outcomes: list[tuple[float, BatchOutcome]]
    tensors: list[Tensor]
    published: bytes
    probe: tuple[tuple[list[float], list[int]], list[float]]
    """And where it is rounded once more."""


def _make(kind: str, ranks: Ranks, *, is_sharded: bool) -> tuple[Policy, ScheduledOptimizer]:
    make = adapted_policy if kind.startswith("lora") else new_policy
    with forced_shards() if is_sharded else nullcontext():
        if kind in NARROW:
            policy, optimizer = _make_narrow(kind, ranks)
        else:
            policy, optimizer = make(ranks, settings=KINDS[kind])
    assert all(isinstance(p, DTensor) == is_sharded for p in policy.parameters())
    return policy, optimizer


def _make_narrow(kind: str, ranks: Ranks) -> tuple[Policy, ScheduledOptimizer]:
    """Make a policy that trains in float32 and computes in bfloat16, as on a card."""
    causal_lm, settings = tiny_causal_lm(width=WIDE), KINDS[kind]
    adapt(causal_lm, settings, settings.base_dtype)
    policy = Policy(causal_lm, temperature=1.0).eval()
    kept: Kept = "full" if "full" in kind else "none"
    shard(policy, ranks.mesh, dtype=torch.bfloat16, activations=kept)
    if settings.lora_rank:
        policy.adapter = begin_adapters(causal_lm, settings, dtype="bfloat16", ranks=ranks)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if name.endswith("lora_b"):
                    local_of(parameter).fill_(0.01)
    return policy, ScheduledOptimizer(policy, constant_rate(1e-3), settings)


def _train(policy: Policy, optimizer: ScheduledOptimizer, steps: range, ranks: Ranks) -> Found:
    trained = [train(policy, optimizer, step, ranks) for step in steps]
    return Found(
        [(each.loss, each.outcome) for each in trained],
        [t.clone() for t in (*whole(policy), *whole_moments(optimizer))],
        published_bytes(policy.causal_lm),
        (
            probe_scores(policy, PROBE, NUMBERS),
            rounded_logprobs(policy, PROBE, dtype=torch.bfloat16),
        ),
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


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_computes_in_bfloat16_without_fsdp_as_with_it_to_the_bit(
    ranks: Ranks, family: str
) -> None:
    rows = [range(3, 12), range(5, 17), range(7, 9)]
    sequences, indices_N = (
        Sequences.from_token_ids(rows, prefixes=[None, 0, None]),
        torch.arange(1, 9),
    )
    found = []
    for is_sharded in (False, True):
        causal_lm = make_random_model(family, initializer_range=0.05)
        policy = Policy(causal_lm, temperature=1.0).eval()
        with forced_shards() if is_sharded else nullcontext():
            shard(policy, ranks.mesh, dtype=torch.bfloat16)
        logprobs_N = policy(sequences, indices_N).logprobs_N
        logprobs_N.sum().backward()
        grads = (p.grad for p in policy.parameters())
        own = [g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None]
        release(policy)
        found.append([logprobs_N.detach(), *own])

    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert {gradient.dtype for gradient in found[0]} == {torch.float32}


def test_narrow_copies_are_gone_once_a_layer_has_been_computed(ranks: Ranks) -> None:
    policy, _ = _make("bfloat16, full", ranks, is_sharded=False)
    dtypes: list[set[torch.dtype]] = []

    def look(layer: nn.Module, *_: object) -> None:
        dtypes.append({parameter.dtype for parameter in layer.parameters()})

    for layer in layers_of(policy.causal_lm.base_model):
        layer.register_forward_hook(look)

    probe_scores(policy, PROBE, NUMBERS)

    assert dtypes == 2 * [{torch.float32}]
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


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
