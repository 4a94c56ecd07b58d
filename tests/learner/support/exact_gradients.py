"""Loss and gradients of a small random model, to compare ways of computing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from buffer.record.episode import Episode
from configs.settings import AlgorithmSettings
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch
from learner.data.batch import PlanRow, pack, plan_batch
from learner.model.policy import Policy
from learner.training.divergence import DivergenceMeter
from learner.training.step import accumulate
from tests.learner.support.made_branches import written_out
from tests.learner.support.padded import PaddedPolicy, StayWide
from tests.learner.support.random_models import make_random_model

FAMILIES = ("qwen3", "llama", "gemma2", "gemma3_text", "granite")
SETTINGS = AlgorithmSettings(entropy_bonus=0.01)
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
EXACT, ROUNDED = 1e-10, 1e-5
PRECISIONS = [(torch.float64, EXACT), (torch.float32, ROUNDED)]
Found = tuple[float, list[Tensor]]


def make_model(family: str, dtype: torch.dtype) -> Any:
    """Make a random model of a family."""
    # The attention's scale of a Granite is not the usual one.
    own = {"attention_multiplier": 0.1} if family == "granite" else {}
    return make_random_model(family, **SHAPE | own).to(dtype)


def packed(episodes: Sequence[Episode], microbatch_tokens: int) -> list[Microbatch]:
    """Plan and pack a batch for one rank."""
    plan = plan_batch(
        1,
        episodes,
        ranks=1,
        settings=SETTINGS,
        max_completion_tokens=12,
        microbatch_tokens=microbatch_tokens,
    )
    return pack(plan, episodes, settings=SETTINGS, lineages={1: 0}, lineage=1)


def packed_alone(episodes: Sequence[Episode]) -> list[Microbatch]:
    """Pack each path by itself, with the advantage of its episode and the counts of the batch."""
    plan = plan_batch(
        1, episodes, ranks=1, settings=SETTINGS, max_completion_tokens=12, microbatch_tokens=1000
    )
    advantages = {row.task_id: row.advantage for row in plan.rows}
    rows = [(e.task_id, row) for e in episodes for row in written_out(e)]
    planned = tuple(
        PlanRow(row.task_id, 0, advantages[task_id], minibatch=0, microbatch=number)
        for number, (task_id, row) in enumerate(rows)
    )
    alone = replace(plan, rows=planned)
    return pack(alone, [row for _, row in rows], settings=SETTINGS, lineages={1: 0}, lineage=1)


def train(scorer: Policy | PaddedPolicy, microbatches: Sequence[Microbatch]) -> Found:
    """Loss of a batch, and the gradient of every parameter."""
    meter = DivergenceMeter(SETTINGS, torch.device("cpu"))
    loss = 0.0
    with StayWide():
        for microbatch in microbatches:
            prepared = PreparedMicrobatch(microbatch)
            loss += float(accumulate(cast("Policy", scorer), prepared, meter, SETTINGS))
    gradients = {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}
    assert gradients
    return loss, [gradients[name] for name in sorted(gradients)]


def assert_equal(found: Found, expected: Found, tolerance: float) -> None:
    """Compare relative to the largest element of each gradient."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    errors = [
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found[1], expected[1], strict=True)
    ]
    assert max(errors) <= tolerance, errors
