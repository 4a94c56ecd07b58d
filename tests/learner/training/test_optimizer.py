"""Schedules, and steps that are skipped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from configs.settings import LearnerSettings
from learner.algorithm.sequences import Sequences
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.model.ranks import Ranks
from learner.reporting.metrics import Totals
from learner.training.optimizer import AdamWithSchedule, Schedule
from tests.learner.support.tiny_policy import constant_rate, parameters_of, tiny_policy


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 0.55, 0.1]),
    ],
)
def test_the_rate_warms_up_and_decays_to_its_floor(decay: str, expected: list[float]) -> None:
    schedule = Schedule(peak=1.0, warmup_steps=2, decay=decay, min_ratio=0.1, steps=12)

    rates = [schedule.rate(step) for step in (1, 2, 7, 12)]

    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(ranks: Ranks, poison: float) -> None:
    policy = tiny_policy(ranks.mesh)
    optimizer = AdamWithSchedule(policy, constant_rate(1e-2), LearnerSettings())
    sequences, indices_N = Sequences.of([[3, 4, 5]]), torch.tensor([1, 2])
    policy(sequences, indices_N).logprobs_N.sum().backward()
    assert not optimizer.step(1).skipped
    before = parameters_of(policy, optimizer)

    (policy(sequences, indices_N).logprobs_N.sum() * poison).backward()
    outcome = optimizer.step(2)

    assert outcome.skipped
    after = parameters_of(policy, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_gradients_are_clipped_by_their_global_norm(ranks: Ranks) -> None:
    policy = tiny_policy(ranks.mesh)
    optimizer = AdamWithSchedule(policy, constant_rate(1e-2), LearnerSettings(max_grad_norm=0.5))
    policy(Sequences.of([[3, 4, 5]]), torch.tensor([1, 2])).logprobs_N.sum().backward()
    squares = [p.grad.full_tensor().square().sum() for p in policy.parameters()]  # type: ignore[union-attr]

    outcome = optimizer.step(1)

    assert outcome.grad_norm == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-5)
    assert outcome.grad_norm > 0.5
    # Adam's first moment is a tenth of the clipped gradient.
    moments = [s["exp_avg"].full_tensor().square().sum() for s in optimizer.adam.state.values()]
    assert float(sum(moments)) ** 0.5 == pytest.approx(0.05, rel=1e-3)


def test_a_resume_takes_its_betas_from_the_settings(ranks: Ranks, tmp_path: Path) -> None:
    policy, settings = tiny_policy(ranks.mesh), LearnerSettings(adam_beta1=0.8)
    optimizer = AdamWithSchedule(policy, constant_rate(1e-2), LearnerSettings())
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1)
    checkpoints = Checkpoints(tmp_path, keep=1, ranks=ranks)
    state = LearnerState("r", "h", 1, lineage=1, cursor=0, trained=(), totals=Totals())
    path = checkpoints.save(state, policy, optimizer)

    resumed = AdamWithSchedule(policy, constant_rate(1e-2), settings)
    checkpoints.load(path, policy, resumed)

    [group] = resumed.adam.param_groups
    assert group["betas"] == (0.8, settings.adam_beta2)
    assert len(resumed.adam.state) == len(optimizer.adam.state) > 0, "with the moments as saved"
