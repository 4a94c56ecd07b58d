"""KL penalties to the reference, against exact KL divergences and their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings, LearnerSettings
from learner.algorithm.microbatch import Microbatch, empty_microbatch
from learner.algorithm.reference_kl import ESTIMATORS, kl_penalty, kl_rewards, rewards_to_go
from learner.data.batch import pack, plan_batch
from learner.model.policy import freeze
from learner.model.ranks import Ranks
from learner.training.optimizer import ScheduledOptimizer
from learner.training.preparation import prepare
from learner.training.step import train_batch
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.tiny_policy import constant_rate, tiny_policy

# Three policies over four tokens, none near another.
LOGITS_PI = torch.tensor([0.3, -0.6, 1.1, 0.2], dtype=torch.float64)
LOG_REF = torch.tensor([0.9, 0.4, -0.7, 0.1], dtype=torch.float64).log_softmax(-1)
LOG_MU = torch.tensor([-0.2, 0.5, 0.3, 0.8], dtype=torch.float64).log_softmax(-1)


def _settings(estimator: str, rho_bar: float = 1e6) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(
        {"kl_coefficient": 0.1, "kl_estimator": estimator, "rho_bar": rho_bar}
    )


def _exact_kl(logits: Tensor) -> Tensor:
    log_pi = logits.log_softmax(-1)
    return (log_pi.exp() * (log_pi - LOG_REF)).sum()


def _expected_penalty(logits: Tensor, estimator: str) -> Tensor:
    """Weigh each token's penalty with its probability under mu: the expectation, exactly."""
    log_pi = logits.log_softmax(-1)
    penalty = kl_penalty(log_pi, LOG_REF, log_pi - LOG_MU, _settings(estimator))
    return (LOG_MU.exp() * penalty).sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_is_that_of_the_kl_though_tokens_come_from_mu(estimator: str) -> None:
    logits = LOGITS_PI.clone().requires_grad_()

    (found,) = torch.autograd.grad(_expected_penalty(logits, estimator), logits)

    (exact,) = torch.autograd.grad(_exact_kl(logits), logits)
    assert torch.allclose(found, exact, atol=1e-12)


def test_k1_and_k3_are_unbiased_in_value_too() -> None:
    exact = float(_exact_kl(LOGITS_PI))

    assert float(_expected_penalty(LOGITS_PI, "k1")) == pytest.approx(exact, abs=1e-12)
    assert float(_expected_penalty(LOGITS_PI, "k3")) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_written_gradient_is_the_one_that_autograd_finds(estimator: str) -> None:
    """k1 and k3 with u differentiated, k2 with u held constant; finite differences of the text."""

    def written(log_pi: float, at: float) -> float:
        deltas = torch.tensor(log_pi - 0.3, dtype=torch.float64)
        u = torch.tensor((at if estimator == "k2" else log_pi) + 1.1, dtype=torch.float64).exp()
        return float(u * ESTIMATORS[estimator](deltas))

    at, step = -0.8, 1e-6
    log_pi = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    log_ref, log_rho = torch.full_like(log_pi, 0.3).detach(), log_pi.detach() + 1.1
    penalty = kl_penalty(log_pi, log_ref, log_rho, _settings(estimator))
    (gradient,) = torch.autograd.grad(penalty.sum(), log_pi)

    assert float(penalty.detach()) == pytest.approx(written(at, at))
    slope = (written(at + step, at) - written(at - step, at)) / (2 * step)
    assert float(gradient) == pytest.approx(slope, rel=1e-6)


def test_a_ratio_beyond_rho_bar_weighs_rho_bar() -> None:
    log_pi, log_ref = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])
    penalty = kl_penalty(log_pi, log_ref, torch.tensor([5.0, 0.0]), _settings("k1", rho_bar=2.0))

    assert penalty.tolist() == pytest.approx([2.0 * 0.5, 0.5])


def test_a_token_that_only_the_reference_expects_leaves_the_gradient_finite() -> None:
    log_pi = torch.tensor([-80.0], requires_grad=True)
    penalty = kl_penalty(log_pi, torch.tensor([-0.1]), torch.tensor([0.0]), _settings("k3"))

    (gradient,) = torch.autograd.grad(penalty.sum(), log_pi)

    assert gradient.tolist() == pytest.approx([-79.9])


def test_the_reward_loses_the_log_ratio() -> None:
    rewards = kl_rewards(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), _settings("k1"))

    assert rewards.tolist() == pytest.approx([-0.05, 0.1])


def _microbatch(lengths: list[int], rewards: list[float]) -> Microbatch:
    episodes = [episode for episode, length in enumerate(lengths) for _ in range(length)]
    return replace(
        empty_microbatch(),
        episodes_N=torch.tensor(episodes, dtype=torch.int64),
        rewards_B=torch.tensor(rewards),
    )


def test_rewards_to_go_are_the_episodes_reward_and_what_its_later_tokens_earn() -> None:
    earned = [0.1, -0.2, 0.3, 0.5, -0.1, 0.05]
    lengths, rewards = [2, 0, 3, 1], [1.0, 7.0, -1.0, 0.5]

    found = rewards_to_go(_microbatch(lengths, rewards), torch.tensor(earned))

    expected: list[float] = []
    start = 0
    for length, reward in zip(lengths, rewards, strict=True):
        end = start + length
        expected += [reward + sum(earned[t:end]) for t in range(start, end)]
        start = end
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_batch_pays_for_its_kl_before_its_first_optimizer_step(ranks: Ranks) -> None:
    """However it is cut: advantages fall where pi has left the reference, and are whitened."""
    settings = AlgorithmSettings.model_validate(
        {
            "advantage": "reinforce_pp",
            "kl_coefficient": 0.5,
            "kl_in": "reward",
            "kl_estimator": "k1",
        }
    )
    policy, reference = tiny_policy(), freeze(tiny_policy(seed=3))
    episodes = random_group_episodes(4, 3, seed=1)
    found = {}
    for microbatch_tokens in (24, 16384):
        plan = plan_batch(
            1,
            episodes,
            ranks=1,
            settings=settings,
            max_completion_tokens=8,
            microbatch_tokens=microbatch_tokens,
        )
        microbatches = pack(
            plan,
            episodes,
            settings=settings,
            lineages={1: 0},
            lineage=1,
        )
        prepared = prepare(
            policy, microbatches, settings=settings, ranks=ranks, reference=reference
        )
        advantages = [each.microbatch.advantages_N for each in prepared]
        found[microbatch_tokens] = torch.cat(advantages).sort().values  # in any order

    assert torch.allclose(found[24], found[16384], atol=1e-5)
    assert float(found[24].mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(found[24].std(correction=0)) == pytest.approx(1.0, abs=1e-3)


def test_the_loss_of_a_batch_pays_the_kl_as_often_as_its_tokens_weigh(ranks: Ranks) -> None:
    # No ratio is truncated, so what is paid is the figure that is shown.
    plain = AlgorithmSettings(rho_bar=1e6, num_epochs=2)
    losses, figures = [], []
    for settings in (plain, plain.model_copy(update={"kl_coefficient": 0.3})):
        policy = tiny_policy(ranks.mesh)
        optimizer = ScheduledOptimizer(policy, constant_rate(1e-12), LearnerSettings())
        episodes = random_group_episodes(4, 3, seed=1)
        plan = plan_batch(
            1, episodes, ranks=1, settings=settings, max_completion_tokens=8, microbatch_tokens=24
        )
        microbatches = pack(
            plan,
            episodes,
            settings=settings,
            lineages={1: 0},
            lineage=1,
        )
        trained = train_batch(
            policy,
            optimizer,
            1,
            microbatches,
            settings=settings,
            ranks=ranks,
            reference=freeze(tiny_policy(ranks.mesh, seed=3)),
        )
        losses.append(trained.loss)
        figures.append(trained.divergence.kl_pi_ref_k3)

    assert figures[0] is None and figures[1] is not None and figures[1] > 0.1
    assert losses[1] - losses[0] == pytest.approx(0.3 * figures[1], rel=1e-5)
