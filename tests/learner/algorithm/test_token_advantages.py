"""Advantages of the tokens of a microbatch, against loops over its episodes."""

from __future__ import annotations

import math

import pytest
import torch

from configs.settings import AlgorithmSettings, CriticSettings
from learner.algorithm.token_advantages import token_advantages
from learner.data.batch import pack, plan_batch
from tests.learner.support.made_episodes import make_episode

SETTINGS = CriticSettings(kind="head", gamma=0.9, lam=0.8, rho_bar=1.5, c_bar=1.1)
EPISODES = [
    # The environment's tokens between the sampled ones, mask 0, are no steps of the trajectory.
    make_episode(0, completion=(8, 9, 4, 5, 6), mask=(1, 0, 0, 1, 1), reward=1.0),
    make_episode(1, completion=(8, 9), mask=(1, 1), reward=-0.5),
    make_episode(3, completion=(7,), mask=(1,), reward=0.25),
]
LENGTHS = {0: 3, 1: 2, 3: 1}


@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_a_trajectory_is_the_trained_tokens_of_an_episode(name: str) -> None:
    algorithm = AlgorithmSettings()
    plan = plan_batch(
        1, EPISODES, ranks=1, settings=algorithm, max_completion_tokens=8, microbatch_tokens=1000
    )
    (microbatch,) = pack(
        plan,
        EPISODES,
        settings=algorithm,
        lineages={1: 0},
        lineage=1,
    )
    num_tokens = len(microbatch.indices_N)
    torch.manual_seed(0)
    log_rhos_N, values_N = torch.randn(2, num_tokens)

    found = token_advantages(microbatch, log_rhos_N, values_N, name=name, settings=SETTINGS)

    assert num_tokens == sum(LENGTHS.values())
    for b, reward in enumerate(microbatch.rewards_B.tolist()):
        tokens = (microbatch.episodes_N == b).nonzero().flatten()
        one = _one_by_one if name == "gae" else _one_by_one_off_policy
        advantages, targets = one(log_rhos_N[tokens].tolist(), values_N[tokens].tolist(), reward)
        assert found.advantages_N[tokens].tolist() == pytest.approx(advantages, abs=1e-5)
        assert found.targets_N[tokens].tolist() == pytest.approx(targets, abs=1e-5)


def _one_by_one(
    _log_rhos: list[float], values: list[float], reward: float
) -> tuple[list[float], list[float]]:
    """Sum the temporal differences of one episode, each token's for itself."""
    steps = len(values)
    rewards = [0.0] * (steps - 1) + [reward]
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + SETTINGS.gamma * following[t] - values[t] for t in range(steps)]
    weight = SETTINGS.gamma * SETTINGS.lam
    advantages = [sum(weight ** (t - s) * deltas[t] for t in range(s, steps)) for s in range(steps)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _one_by_one_off_policy(
    log_rhos: list[float], values: list[float], reward: float
) -> tuple[list[float], list[float]]:
    """Sum the products of V-trace for one episode, each token's for itself."""
    steps, gamma = len(values), SETTINGS.gamma
    rhos = [min(SETTINGS.rho_bar, math.exp(x)) for x in log_rhos]
    cs = [min(SETTINGS.c_bar, math.exp(x)) for x in log_rhos]
    rewards = [0.0] * (steps - 1) + [reward]
    following = [*values[1:], 0.0]
    deltas = [rhos[t] * (rewards[t] + gamma * following[t] - values[t]) for t in range(steps)]
    targets = [
        values[s] + sum(gamma ** (t - s) * math.prod(cs[s:t]) * deltas[t] for t in range(s, steps))
        for s in range(steps)
    ]
    behind = [*targets[1:], 0.0]
    return [rhos[t] * (rewards[t] + gamma * behind[t] - values[t]) for t in range(steps)], targets


def test_a_microbatch_without_tokens_has_no_advantages() -> None:
    algorithm = AlgorithmSettings()
    plan = plan_batch(
        1,
        EPISODES[1:2],
        ranks=2,
        settings=algorithm,
        max_completion_tokens=8,
        microbatch_tokens=1000,
    )
    (microbatch,) = pack(plan, [], settings=algorithm, lineages={1: 0}, lineage=1)
    nothing = torch.zeros(0)

    found = token_advantages(microbatch, nothing, nothing, name="vtrace", settings=SETTINGS)

    assert len(found.advantages_N) == len(found.targets_N) == 0
