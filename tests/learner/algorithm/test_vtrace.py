"""V-trace against the paper's formula, its limit cases, and another implementation of it."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.algorithm.vtrace import VTrace, discounted_sums, vtrace
from tests.learner.support.trajectories import (
    LENGTHS,
    NUM_STEPS,
    Trajectories,
    n_step_return,
    near,
    random_trajectories,
    sum_of_products,
    value_at,
)

STEPS = [(t, b) for t in range(NUM_STEPS) for b in range(len(LENGTHS))]


def _vtrace(episodes: Trajectories, *, rho_bar: float = 1.0, c_bar: float = 1.0) -> VTrace:
    return vtrace(
        episodes.log_rhos,
        episodes.rewards,
        episodes.discounts,
        episodes.values,
        episodes.bootstrap_value,
        rho_bar=rho_bar,
        c_bar=c_bar,
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("rho_bar", "c_bar"),
    [(1.0, 1.0), (2.0, 0.7), (0.5, 0.5), (math.inf, 1.0), (math.inf, math.inf)],
)
def test_targets_and_advantages_equal_the_papers_formula(
    seed: int, rho_bar: float, c_bar: float
) -> None:
    episodes = random_trajectories(seed=seed)

    found = _vtrace(episodes, rho_bar=rho_bar, c_bar=c_bar)

    for t, b in STEPS:
        expected = sum_of_products(episodes, t, b, rho_bar=rho_bar, c_bar=c_bar)
        assert float(found.vs[t, b]) == near(expected)
        following = (
            float(episodes.bootstrap_value[b])
            if t + 1 == NUM_STEPS
            else sum_of_products(episodes, t + 1, b, rho_bar=rho_bar, c_bar=c_bar)
        )
        rho = min(rho_bar, math.exp(float(episodes.log_rhos[t, b])))
        q = float(episodes.rewards[t, b] + episodes.discounts[t, b] * following)
        advantage = rho * (q - value_at(episodes, t, b))
        assert float(found.pg_advantages[t, b]) == near(advantage)


def test_on_policy_targets_are_n_step_bellman_targets() -> None:
    episodes = random_trajectories(is_on_policy=True)

    found = _vtrace(episodes, rho_bar=1.0, c_bar=1.0)

    for t, b in STEPS:
        target = n_step_return(episodes, t, b, num_steps=NUM_STEPS - t)
        assert float(found.vs[t, b]) == near(target)
        advantage = target - float(episodes.values[t, b])
        assert float(found.pg_advantages[t, b]) == near(advantage)


def test_infinite_bounds_without_a_critic_are_importance_sampling_per_decision() -> None:
    episodes = random_trajectories()
    nothing = torch.zeros_like(episodes.values)

    found = _vtrace(
        replace(episodes, values=nothing, bootstrap_value=nothing[0]),
        rho_bar=math.inf,
        c_bar=math.inf,
    )

    for s, b in STEPS:
        expected, weight = 0.0, 1.0
        for t in range(s, NUM_STEPS):
            weight *= math.exp(float(episodes.log_rhos[t, b]))
            expected += weight * float(episodes.rewards[t, b])
            weight *= float(episodes.discounts[t, b])
        assert float(found.vs[s, b]) == near(expected)


def test_a_trace_of_almost_nothing_gives_one_step_targets() -> None:
    episodes = random_trajectories(is_on_policy=True)

    found = _vtrace(episodes, rho_bar=1.0, c_bar=1e-15)

    for t, b in STEPS:
        expected = n_step_return(episodes, t, b, num_steps=1)
        assert float(found.vs[t, b]) == near(expected)


@pytest.mark.parametrize("b", range(len(LENGTHS)))
def test_padding_behind_an_episode_changes_nothing_before_it(b: int) -> None:
    episodes = random_trajectories()
    together = _vtrace(episodes, rho_bar=1.5, c_bar=1.0)

    one = Trajectories(
        log_rhos=episodes.log_rhos[: LENGTHS[b], b : b + 1],
        rewards=episodes.rewards[: LENGTHS[b], b : b + 1],
        discounts=episodes.discounts[: LENGTHS[b], b : b + 1],
        values=episodes.values[: LENGTHS[b], b : b + 1],
        bootstrap_value=episodes.bootstrap_value[b : b + 1],
    )
    alone = _vtrace(one, rho_bar=1.5, c_bar=1.0)

    for ours, whole in zip(alone, together, strict=True):
        assert torch.allclose(ours[:, 0], whole[: LENGTHS[b], b], rtol=1e-12, atol=1e-12)


def test_nothing_carries_a_gradient() -> None:
    episodes = random_trajectories()
    episodes.values.requires_grad_()
    episodes.log_rhos.requires_grad_()

    assert not any(result.requires_grad for result in _vtrace(episodes))


@pytest.mark.parametrize("c_bar", [0.0, -1.0, 1.1, math.nan])
def test_a_trace_bound_out_of_range_is_refused(c_bar: float) -> None:
    with pytest.raises(ValueError, match=r"c_bar must be > 0 and <= rho_bar = 1\.0, got"):
        _vtrace(random_trajectories(), rho_bar=1.0, c_bar=c_bar)


@pytest.mark.parametrize("name", ["log_rhos", "discounts", "values", "bootstrap_value"])
def test_a_field_of_another_shape_is_refused(name: str) -> None:
    episodes = random_trajectories()
    wrong = replace(episodes, **{name: getattr(episodes, name)[:1]})

    with pytest.raises(ValueError, match=rf"{name} must have the shape \[.*\], .* got \[1"):
        _vtrace(wrong)


@pytest.mark.parametrize("shape", [(3,), (0, 3)])
def test_rewards_that_are_no_trajectories_are_refused(shape: tuple[int, ...]) -> None:
    episodes = replace(random_trajectories(), rewards=torch.zeros(shape))

    with pytest.raises(ValueError, match=r"rewards must have a shape \[T, B\] with T >= 1"):
        _vtrace(episodes)


@pytest.mark.skipif(
    importlib.util.find_spec("rlax") is None, reason="run with the peers, in a step of `./run test`"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rho_bar", [1.0, 2.5])
def test_targets_and_advantages_equal_those_of_rlax(rho_bar: float) -> None:
    import rlax  # pyright: ignore[reportMissingImports]

    episodes = random_trajectories()

    found = _vtrace(episodes, rho_bar=rho_bar, c_bar=1.0)

    next_values = torch.cat([episodes.values[1:], episodes.bootstrap_value[None]])
    for b in range(len(LENGTHS)):
        peers = rlax.vtrace_td_error_and_advantage(
            episodes.values[:, b].numpy(),
            next_values[:, b].numpy(),
            episodes.rewards[:, b].numpy(),
            episodes.discounts[:, b].numpy(),
            episodes.log_rhos[:, b].exp().numpy(),
            clip_rho_threshold=rho_bar,
            clip_pg_rho_threshold=rho_bar,
        )
        errors = (found.vs - episodes.values)[:, b].tolist()
        assert list(map(float, peers.errors)) == pytest.approx(errors, rel=1e-5, abs=1e-5)
        advantages = found.pg_advantages[:, b].tolist()
        assert list(map(float, peers.pg_advantage)) == pytest.approx(advantages, rel=1e-5, abs=1e-5)


def _sums_one_by_one(terms: Tensor, factors: Tensor) -> Tensor:
    """Walk from the last step to the first."""
    sums, last = torch.empty_like(terms), torch.zeros_like(terms[0])
    for t in reversed(range(len(terms))):
        last = terms[t] + factors[t] * last
        sums[t] = last
    return sums


@pytest.mark.parametrize("steps", [1, 2, 3, 64, 1000])
def test_sums_of_all_steps_at_once_equal_those_one_after_the_other(steps: int) -> None:
    """Resets in the middle, as between the episodes of a packed row, and factors beyond 1."""
    generator = torch.Generator().manual_seed(steps)
    terms, factors = torch.randn(2, steps, 3, dtype=torch.float64, generator=generator)
    factors = factors.sigmoid() * 1.1 * (torch.rand(steps, 3, generator=generator) > 0.01)

    sums = discounted_sums(terms, factors)

    torch.testing.assert_close(sums, _sums_one_by_one(terms, factors), rtol=1e-12, atol=1e-12)
    assert discounted_sums(terms.float(), factors.float()).dtype == torch.float32


def test_products_of_factors_that_overflow_in_float32_leave_no_trace() -> None:
    terms = torch.zeros(300, 1)
    terms[150] = 1.0

    sums = discounted_sums(terms, torch.full((300, 1), 2.0))

    assert not sums.isnan().any() and float(sums[140]) == 2.0**10
