"""Generalised advantage estimates against sums written out."""

from __future__ import annotations

import pytest
import torch

from learner.algorithm.token_advantages import gae
from learner.algorithm.vtrace import vtrace
from tests.learner.support.trajectories import (
    LENGTHS,
    NUM_STEPS,
    n_step_return,
    near,
    random_trajectories,
)

STEPS = [(t, b) for t in range(NUM_STEPS) for b in range(len(LENGTHS))]
EPISODES = random_trajectories()
FIELDS = (EPISODES.rewards, EPISODES.discounts, EPISODES.values, EPISODES.bootstrap_value)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_gae_weighs_the_advantages_of_all_horizons(lam: float) -> None:
    found = gae(*FIELDS, lam=lam)

    for t, b in STEPS:
        horizon = NUM_STEPS - t
        # (1 - lambda) sum_k lambda^(k - 1) A(k); the longest horizon takes the weight that is left.
        expected = lam ** (horizon - 1) * n_step_return(EPISODES, t, b, num_steps=horizon)
        for k in range(1, horizon):
            weight = (1 - lam) * lam ** (k - 1)
            expected += weight * n_step_return(EPISODES, t, b, num_steps=k)
        assert float(found.targets[t, b]) == near(expected)
        advantage = expected - float(EPISODES.values[t, b])
        assert float(found.advantages[t, b]) == near(advantage)


def test_lambda_0_is_the_temporal_difference() -> None:
    next_values = torch.cat([EPISODES.values[1:], EPISODES.bootstrap_value[None]])
    differences = EPISODES.rewards + EPISODES.discounts * next_values - EPISODES.values

    assert torch.allclose(gae(*FIELDS, lam=0.0).advantages, differences, atol=1e-12)


def test_gae_at_lambda_1_is_v_trace_on_policy() -> None:
    ours = gae(*FIELDS, lam=1.0)

    theirs = vtrace(torch.zeros_like(EPISODES.values), *FIELDS, rho_bar=1.0, c_bar=1.0)

    assert torch.allclose(ours.advantages, theirs.pg_advantages, atol=1e-12)
    assert torch.allclose(ours.targets, theirs.vs, atol=1e-12)


@pytest.mark.parametrize("b", range(len(LENGTHS)))
def test_padding_behind_an_episode_changes_nothing_before_it(b: int) -> None:
    rewards, discounts, values = (field[: LENGTHS[b], b : b + 1] for field in FIELDS[:3])
    alone = gae(rewards, discounts, values, FIELDS[3][b : b + 1], lam=0.9)

    together = gae(*FIELDS, lam=0.9)

    for ours, whole in zip(alone, together, strict=True):
        assert torch.allclose(ours[:, 0], whole[: LENGTHS[b], b], atol=1e-12)


@pytest.mark.parametrize("lam", [-0.1, 1.1])
def test_lambda_out_of_range_is_refused(lam: float) -> None:
    with pytest.raises(ValueError, match=r"lam must be >= 0 and <= 1, got"):
        gae(*FIELDS, lam=lam)


def test_values_of_another_shape_are_refused() -> None:
    rewards, discounts, values, bootstrap_value = FIELDS

    with pytest.raises(ValueError, match=r"values must have the shape"):
        gae(rewards, discounts, values[1:], bootstrap_value, lam=1.0)
    with pytest.raises(ValueError, match=r"bootstrap_value must have the shape"):
        gae(rewards, discounts, values, bootstrap_value[1:], lam=1.0)
