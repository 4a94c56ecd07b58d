"""The optimizer steps of a batch: equal for every cut of it, with a fixed anchor."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from buffer.record.episode import Episode
from configs.settings import AlgorithmSettings, LearnerSettings
from learner.algorithm.microbatch import Microbatch, Sequences
from learner.data.batch import BatchPlan, pack, plan_batch
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.training.divergence import DivergenceMeter
from learner.training.optimizer import Schedule, ScheduledOptimizer, StepOutcome
from learner.training.preparation import prepare
from learner.training.step import accumulate, train_batch
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.padded import StayWide
from tests.learner.support.random_models import FAMILIES
from tests.learner.support.ranks.exact_training import (
    CASES,
    Descent,
    train,
    train_sharded,
)
from tests.learner.support.ranks.several_ranks import run_ranks
from tests.learner.support.tiny_policy import constant_rate, tiny_policy

EPISODES = random_group_episodes(4, 3, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks found."""
    folder = tmp_path_factory.mktemp("exact-training")
    run_ranks(folder, ("exact_training", 2))
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[tuple[float, Tensor]]:
    """What two ranks found, for each case."""
    found: list[tuple[float, Tensor]] = torch.load(folder / "found.pt")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAMILIES) + 1))
def test_one_rank_and_two_have_the_same_gradient_which_is_reduced_once(
    number: int, folder: Path, ranks: Ranks
) -> None:
    has_room = number < len(FAMILIES)
    family = FAMILIES[number] if has_room else FAMILIES[0]
    loss, gradients, _ = train_sharded(family, ranks, microbatch_tokens=16384)

    other_loss, others, num_reductions = torch.load(folder / "sharded.pt")[number]

    assert other_loss == pytest.approx(loss, rel=1e-10)
    for ours, theirs in zip(others, gradients, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-10 * float(theirs.abs().max())
    units = 3  # two layers, and the rest
    assert num_reductions == units if has_room else num_reductions >= 2 * units


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_loss_and_gradients_do_not_depend_on_the_cut(
    number: int, two_ranks: list[tuple[float, Tensor]], ranks: Ranks
) -> None:
    loss, gradients = train(CASES[number], ranks, microbatch_tokens=16384)

    for other_loss, others in (
        train(CASES[number], ranks, microbatch_tokens=24),
        two_ranks[number],
    ):
        assert other_loss == pytest.approx(loss, abs=1e-10)
        assert float((others - gradients).abs().max()) < 1e-10
    assert gradients.shape[0] == CASES[number].get("num_epochs", 1) ** 2
    assert (gradients.abs().amax(1) > 1e-4).all()


@pytest.fixture
def stay_wide() -> Iterator[None]:
    """Norms in float64: prompts that are shared or not round other gradients to float32."""
    with StayWide():
        yield


def _plan(settings: AlgorithmSettings) -> BatchPlan:
    return plan_batch(
        3,
        EPISODES,
        ranks=1,
        settings=settings,
        max_completion_tokens=8,
        microbatch_tokens=64,
        num_minibatches=settings.num_minibatches,
    )


def _pack(settings: AlgorithmSettings) -> list[Microbatch]:
    return pack(
        _plan(settings),
        EPISODES,
        settings=settings,
        lineages={1: 0},
        lineage=1,
    )


def _new(rate: float = 1e-2) -> tuple[Policy, ScheduledOptimizer]:
    policy = tiny_policy()
    return policy, ScheduledOptimizer(policy, constant_rate(rate), LearnerSettings())


def _settings(**choices: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(choices)


def _equal(ours: Policy, theirs: Policy) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_one_step_is_one_pass_over_all_microbatches(ranks: Ranks) -> None:
    settings = _settings()
    policy, optimizer = _new()
    trained = train_batch(policy, optimizer, 3, _pack(settings), settings=settings, ranks=ranks)

    other, other_optimizer = _new()
    meter = DivergenceMeter(settings, ranks.device)
    for prepared in prepare(other, _pack(settings), settings=settings, ranks=ranks):
        accumulate(other, prepared, meter, settings)
    outcome = other_optimizer.step(3)

    assert _equal(policy, other)
    assert trained.outcome.grad_norm == outcome.grad_norm
    assert (trained.outcome.optimizer_steps, trained.outcome.skipped_steps) == (1, 0)


def _log_probs(policy: Policy, episode: Episode) -> Tensor:
    """Score the trained tokens of one episode by itself."""
    start = len(episode.prompt_ids)
    token_ids = [*episode.prompt_ids.tolist(), *episode.completion.token_ids.tolist()]
    trained = [start + t for t, mask in enumerate(episode.completion.loss_mask) if mask]
    logprobs: Tensor = policy(
        Sequences.from_token_ids([token_ids]), torch.tensor(trained)
    ).logprobs_N
    return logprobs


def _log_mu(episode: Episode) -> Tensor:
    """What the record says of the trained tokens."""
    completion = episode.completion
    return torch.tensor(completion.behaviour_logprobs[completion.loss_mask == 1])


def _objective(policy: Policy, anchor: Policy, episode: Episode, advantage: float) -> Tensor:
    """Decoupled PPO of one episode, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for mu, prox, pi in zip(
        _log_mu(episode), _log_probs(anchor, episode), _log_probs(policy, episode), strict=True
    ):
        weight, ratio = (prox - float(mu)).exp().clamp(max=2.0), (pi - prox).exp()
        clipped = ratio.clamp(0.8, 1.28)
        total = total + weight * torch.minimum(ratio * advantage, clipped * advantage)
    return total


@pytest.mark.usefixtures("stay_wide")
def test_epochs_measure_from_the_policy_of_the_batchs_beginning(ranks: Ranks) -> None:
    """The reference keeps the anchor as a copy of the whole policy."""
    settings = _settings(proximal="recomputed", num_epochs=3, num_minibatches=2)
    policy, other = tiny_policy().double(), tiny_policy().double()
    anchor = copy.deepcopy(other).requires_grad_(False)
    optimizer = cast("ScheduledOptimizer", Descent(policy, ranks, rate=2.0))
    train_batch(policy, optimizer, 3, _pack(settings), settings=settings, ranks=ranks)

    descent, rows = Descent(other, ranks, rate=2.0), _plan(settings).rows
    for _epoch, minibatch in itertools.product(range(3), (0, 1)):
        own = [n for n, row in enumerate(rows) if row.minibatch == minibatch]
        num_tokens = sum(int(EPISODES[n].completion.loss_mask.sum()) for n in own)
        for n in own:
            # Advantages and weights are made in float32.
            advantage, weight = np.float32(rows[n].advantage), np.float32(1 / num_tokens)
            objective = _objective(other, anchor, EPISODES[n], float(advantage))
            (-float(weight) * objective).backward()
        descent.step()

    ratios = torch.cat([_log_probs(other, e) - _log_probs(anchor, e) for e in EPISODES]).exp()
    assert ratios.max() > 1.28 and ratios.min() < 0.8  # another anchor would show
    for ours, theirs in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)


def _bound_of(outward: list[float], most: float) -> float:
    """Leave out the farthest, one after another; the distance of the last that stays."""
    outward = sorted(outward)
    while sum(x * x for x in outward) / len(outward) > most:
        outward.pop()
    return outward[-1]


@pytest.mark.usefixtures("stay_wide")
def test_m2po_bounds_each_optimizer_step_by_the_tokens_and_the_policy_of_that_step(
    ranks: Ranks,
) -> None:
    most = 2.0
    settings = _settings(
        correction="none", surrogate="m2po", second_moment=most, num_epochs=2, num_minibatches=2
    )
    policy, other = tiny_policy().double(), tiny_policy().double()
    optimizer = cast("ScheduledOptimizer", Descent(policy, ranks, rate=0.3))
    train_batch(policy, optimizer, 3, _pack(settings), settings=settings, ranks=ranks)

    descent, rows, bounds = Descent(other, ranks, rate=0.3), _plan(settings).rows, []
    for _epoch, minibatch in itertools.product(range(2), (0, 1)):
        own = [n for n, row in enumerate(rows) if row.minibatch == minibatch]
        advantages = {n: float(np.float32(rows[n].advantage)) for n in own}
        log_ratios = {
            n: _log_probs(other, EPISODES[n]) - _log_mu(EPISODES[n]).double() for n in own
        }
        pairs = [(x, advantages[n]) for n in own for x in log_ratios[n].tolist()]
        bounds.append(_bound_of([abs(x) for x, a in pairs if x * a > 0], most))
        weight = float(np.float32(1 / len(pairs)))
        for n, logs in log_ratios.items():
            stays = (logs * advantages[n] <= 0) | (logs.abs() <= bounds[-1])
            (-weight * (stays * logs.exp() * advantages[n]).sum()).backward()
        descent.step()

    assert len({round(bound, 3) for bound in bounds}) == 4  # one for all of them would show
    for ours, theirs in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)


def test_only_the_step_that_is_not_finite_is_skipped(ranks: Ranks) -> None:
    settings = _settings(num_minibatches=2)
    policy, optimizer = _new()
    poisoned = _pack(settings)
    for microbatch in poisoned:
        if microbatch.minibatch == 0:
            microbatch.advantages_N.fill_(math.nan)

    outcome = train_batch(policy, optimizer, 3, poisoned, settings=settings, ranks=ranks).outcome

    alone, alone_optimizer = _new()
    healthy = [microbatch for microbatch in _pack(settings) if microbatch.minibatch == 1]
    meter = DivergenceMeter(settings, ranks.device)
    for prepared in prepare(alone, healthy, settings=settings, ranks=ranks):
        accumulate(alone, prepared, meter, settings)
    alone_optimizer.step(3)
    assert (outcome.optimizer_steps, outcome.skipped_steps) == (2, 1)
    assert not math.isfinite(outcome.grad_norm)
    assert _equal(policy, alone)


class Watched(ScheduledOptimizer):
    """AdamW that remembers the rates it was applied with."""

    rates: tuple[float, ...] = ()

    def step(self, step: int | None = None, *, loss: float = 0.0) -> StepOutcome:
        """Apply, and remember."""
        outcome = super().step(step, loss=loss)
        self.rates += (float(self._optimizers[0].param_groups[0]["lr"]),)
        return outcome


def test_all_steps_of_a_batch_have_its_learning_rate(ranks: Ranks) -> None:
    settings = _settings(num_epochs=2, num_minibatches=2)
    policy = tiny_policy()
    schedule = Schedule(peak=1e-2, warmup_steps=10, decay="constant", min_ratio=1.0, steps=20)
    optimizer = Watched(policy, schedule, LearnerSettings())

    trained = train_batch(policy, optimizer, 7, _pack(settings), settings=settings, ranks=ranks)

    assert optimizer.rates == (schedule.rate(7),) * 4
    assert trained.outcome.learning_rate == schedule.rate(7)
    assert optimizer.steps_taken == 7
