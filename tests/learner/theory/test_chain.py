"""V-trace on a chain of three states, against linear algebra.

    0 --forward--> 1 --forward--> 2 --forward, reward 1--> 0        back, from anywhere --> 0

Trajectories of mu are enumerated, so that an expectation of the estimator is a finite sum, and a
fixed point can be checked to rounding.

Shapes: S states, A actions (back, forward), T steps, B trajectories.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from learner.algorithm.vtrace import vtrace

NUM_STATES, NUM_STEPS, DISCOUNT = 3, 4, 0.9
BACK, FORWARD = 0, 1
NEXT = torch.tensor([[0, 1], [0, 2], [0, 0]])
REWARDS = torch.tensor([[0.1, 0.0], [0.1, 0.0], [0.1, 1.0]], dtype=torch.float64)
MU = torch.tensor([[0.7, 0.3], [0.5, 0.5], [0.6, 0.4]], dtype=torch.float64)
PI = torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.05, 0.95]], dtype=torch.float64)
RHOS = PI / MU
BOUNDS = [(1.0, 1.0), (1.0, 0.5), (1.5, 1.0), (math.inf, 1.0), (math.inf, math.inf)]
SIGMAS = 5.0

ACTIONS_TB = torch.tensor(list(itertools.product((BACK, FORWARD), repeat=NUM_STEPS))).T


def truncated_policy(rho_bar: float) -> Tensor:
    """pi_rho_bar(a|s), proportional to min(rho_bar mu, pi): whose values V-trace finds."""
    weights_SA = torch.minimum(rho_bar * MU, PI)
    normalised_SA: Tensor = weights_SA / weights_SA.sum(1, keepdim=True)
    return normalised_SA


def values_of(policy_SA: Tensor) -> Tensor:
    """Solve V = r + gamma P V. Shape [S]."""
    steps_SS = torch.zeros(NUM_STATES, NUM_STATES, dtype=torch.float64)
    for state, action in itertools.product(range(NUM_STATES), (BACK, FORWARD)):
        steps_SS[state, NEXT[state, action]] += policy_SA[state, action]
    rewards_S = (policy_SA * REWARDS).sum(1)
    identity_SS = torch.eye(NUM_STATES, dtype=torch.float64)
    values_S: Tensor = torch.linalg.solve(identity_SS - DISCOUNT * steps_SS, rewards_S)
    return values_S


def states_of(start: int, actions_TB: Tensor) -> Tensor:
    """Follow the actions from `start`. Shape [T + 1, B]."""
    states = [torch.full_like(actions_TB[0], start)]
    for actions_B in actions_TB:
        states.append(NEXT[states[-1], actions_B])
    return torch.stack(states)


def targets(
    start: int, actions_TB: Tensor, values_S: Tensor, rho_bar: float, c_bar: float
) -> Tensor:
    """V-trace's target of the first state of each trajectory. Shape [B]."""
    states_UB = states_of(start, actions_TB)
    visited = states_UB[:-1], actions_TB
    found = vtrace(
        RHOS[visited].log(),
        REWARDS[visited],
        torch.full(actions_TB.shape, DISCOUNT, dtype=torch.float64),
        values_S[states_UB[:-1]],
        values_S[states_UB[-1]],
        rho_bar=rho_bar,
        c_bar=c_bar,
    )
    vs_B: Tensor = found.vs[0]
    return vs_B


def probabilities(start: int) -> Tensor:
    """Of each enumerated trajectory under mu. Shape [B]."""
    return MU[states_of(start, ACTIONS_TB)[:-1], ACTIONS_TB].prod(0)


def operator(values_S: Tensor, rho_bar: float, c_bar: float) -> Tensor:
    """Expected target of every state under mu. Shape [S]."""
    return torch.stack(
        [
            probabilities(start) @ targets(start, ACTIONS_TB, values_S, rho_bar, c_bar)
            for start in range(NUM_STATES)
        ]
    )


def test_trajectories_are_enumerated_whole():
    for start in range(NUM_STATES):
        assert float(probabilities(start).sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("rho_bar", "c_bar"), BOUNDS)
def test_the_values_of_the_truncated_policy_are_the_fixed_point(rho_bar, c_bar):
    fixed_S = values_of(truncated_policy(rho_bar))

    assert torch.allclose(operator(fixed_S, rho_bar, c_bar), fixed_S, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("rho_bar", "c_bar"), BOUNDS)
def test_iteration_contracts_to_the_fixed_point_from_anywhere(rho_bar, c_bar):
    fixed_S = values_of(truncated_policy(rho_bar))
    values_S = torch.tensor([5.0, -3.0, 0.0], dtype=torch.float64)

    for _ in range(20):
        gap = (values_S - fixed_S).abs().max()
        values_S = operator(values_S, rho_bar, c_bar)
        assert (values_S - fixed_S).abs().max() < gap


def test_rho_bar_decides_between_the_values_of_pi_and_of_mu():
    """Never truncated, V-trace finds V^pi; as rho_bar goes to 0, V^mu."""
    assert torch.allclose(values_of(truncated_policy(math.inf)), values_of(PI), atol=1e-12)
    assert torch.allclose(values_of(truncated_policy(1e-9)), values_of(MU), atol=1e-12)
    between = values_of(truncated_policy(1.0))
    assert ((values_of(MU) < between) & (between < values_of(PI))).all()


def test_c_bar_changes_the_way_to_the_fixed_point_and_not_the_point():
    start_S = torch.zeros(NUM_STATES, dtype=torch.float64)
    fixed_S = values_of(truncated_policy(1.0))

    gaps = [
        float((operator(start_S, 1.0, c_bar) - fixed_S).abs().max()) for c_bar in (0.1, 0.5, 1.0)
    ]

    assert gaps[0] > gaps[1] > gaps[2]


def test_truncated_traces_vary_less():
    """Exact variance of the first state's target, the critic being right."""

    def variance(rho_bar: float, c_bar: float) -> float:
        fixed_S = values_of(truncated_policy(rho_bar))
        targets_B = targets(0, ACTIONS_TB, fixed_S, rho_bar, c_bar)
        return float(probabilities(0) @ (targets_B - fixed_S[0]) ** 2)

    assert variance(1.0, 1.0) < variance(2.0, 1.0) < variance(math.inf, math.inf)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rho_bar", "c_bar"), BOUNDS)
def test_sampled_targets_average_to_the_fixed_point(rho_bar, c_bar, seed):
    num_samples = 20_000
    fixed_S = values_of(truncated_policy(rho_bar))
    exact_B = targets(0, ACTIONS_TB, fixed_S, rho_bar, c_bar)
    variance = probabilities(0) @ (exact_B - fixed_S[0]) ** 2
    random = torch.Generator().manual_seed(seed)
    states_N, actions = torch.zeros(num_samples, dtype=torch.int64), []
    for _ in range(NUM_STEPS):
        draws_N = torch.rand(num_samples, generator=random, dtype=torch.float64)
        actions.append((draws_N < MU[states_N, FORWARD]).long())
        states_N = NEXT[states_N, actions[-1]]

    mean = targets(0, torch.stack(actions), fixed_S, rho_bar, c_bar).mean()

    assert (mean - fixed_S[0]).abs() / (variance / num_samples).sqrt() < SIGMAS
