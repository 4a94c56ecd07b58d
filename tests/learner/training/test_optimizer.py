"""Schedules, steps that are skipped, and Muon beside AdamW."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from configs.errors import CheckpointError
from configs.settings import LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.reporting.metrics import Totals
from learner.training.optimizer import Schedule, ScheduledOptimizer
from tests.learner.support.ranks.one_of_two_ranks import whole_parameters
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
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    sequences, indices_N = Sequences.from_token_ids([[3, 4, 5]]), torch.tensor([1, 2])
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
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings(max_grad_norm=0.5))
    policy(Sequences.from_token_ids([[3, 4, 5]]), torch.tensor([1, 2])).logprobs_N.sum().backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]

    outcome = optimizer.step(1)

    assert outcome.grad_norm == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-5)
    assert outcome.grad_norm > 0.5
    # Adam's first moment is a tenth of the clipped gradient.
    moments = [optimizer.moments_of(p)["exp_avg"].square().sum() for p in optimizer.parameters]
    assert float(sum(moments)) ** 0.5 == pytest.approx(0.05, rel=1e-3)


STATE = LearnerState(
    run="tiny", settings_hash="h", step=2, lineage=1, cursor=0, trained=(), totals=Totals()
)


def test_a_resume_takes_its_betas_from_the_settings(ranks: Ranks, tmp_path: Path) -> None:
    policy, settings = tiny_policy(ranks.mesh), LearnerSettings(adam_beta1=0.8)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1)
    checkpoints = Checkpoints(tmp_path, keep=1, ranks=ranks)
    path = checkpoints.save(STATE, policy, optimizer)

    resumed = ScheduledOptimizer(policy, constant_rate(1e-2), settings)
    checkpoints.load(path, policy, resumed)

    assert resumed._optimizers[0].param_groups[0]["betas"] == (0.8, settings.adam_beta2)
    for parameter in optimizer.parameters:
        assert torch.equal(
            resumed.moments_of(parameter)["exp_avg"], optimizer.moments_of(parameter)["exp_avg"]
        )


def _with(
    kind: str, ranks: Ranks, *, seed: int = 0, rate: float = 1e-2
) -> tuple[Policy, ScheduledOptimizer]:
    policy = tiny_policy(ranks.mesh, seed=seed)
    settings = LearnerSettings.model_validate({"optimizer": kind})
    return policy, ScheduledOptimizer(policy, constant_rate(rate), settings)


def _imitate(policy: Policy, optimizer: ScheduledOptimizer, steps: range) -> list[float]:
    """Raise the log-probs of a sequence; the loss before each step."""
    losses = []
    for step in steps:
        loss = -policy(
            Sequences.from_token_ids([[3, 4, 5, 9]]), torch.tensor([1, 2, 3])
        ).logprobs_N.mean()
        loss.backward()
        optimizer.step(step)
        losses.append(loss.item())
    return losses


def test_muon_takes_the_matrices_of_layers_and_lowers_a_loss(ranks: Ranks) -> None:
    policy, optimizer = _with("muon", ranks)

    losses = _imitate(policy, optimizer, range(1, 9))

    assert losses[-1] < losses[0] / 2
    kept = {name: set(optimizer.moments_of(p)) for name, p in policy.named_parameters()}
    assert all(kept[name] == optimizer.names_of_moments(p) for name, p in policy.named_parameters())
    with_muon = {name for name, moments in kept.items() if moments == {"momentum_buffer"}}
    assert {name.rpartition(".layers.0.")[2] for name in with_muon if ".layers.0." in name} == {
        f"self_attn.{x}_proj.weight" for x in "qkvo"
    } | {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    assert not any("embed" in name or "norm" in name or "head" in name for name in with_muon)


def test_adamw_in_8_bits_follows_adamw_with_a_quarter_of_the_bytes(ranks: Ranks) -> None:
    exact, its = _with("adamw", ranks, rate=1e-3)
    policy, optimizer = _with("adamw8bit", ranks, rate=1e-3)
    before = [parameter.clone() for parameter in whole_parameters(policy)]

    expected, losses = (
        _imitate(*each, range(1, 31)) for each in ((exact, its), (policy, optimizer))
    )

    assert losses[-1] < losses[0] / 2
    assert losses[1] == pytest.approx(expected[1], rel=1e-6), "the first step is AdamW's own"
    assert losses[-1] == pytest.approx(expected[-1], rel=0.02)
    moved, apart = (
        sum(
            float((a - b).square().sum())
            for a, b in zip(whole_parameters(policy), other, strict=True)
        )
        for other in (before, whole_parameters(exact))
    )
    assert apart < 0.01 * moved, (apart, moved)
    for parameter in optimizer.parameters:
        kept = optimizer.moments_of(parameter)
        assert set(kept) == optimizer.names_of_moments(parameter)
        assert kept.get("exp_avg_codes", kept.get("exp_avg")).dtype == (  # type: ignore[union-attr]
            torch.uint8 if parameter.ndim == 2 else torch.float32
        )


def test_a_step_of_muon_is_orthogonal_and_as_long_as_one_of_adam(ranks: Ranks) -> None:
    policy, optimizer = _with("muon", ranks)
    weight = next(p for name, p in policy.named_parameters() if "gate_proj" in name)
    before = weight.detach().clone()
    for parameter in optimizer.parameters:
        parameter.grad = torch.randn_like(parameter)

    optimizer.step(1)

    change = (weight.detach() - before) / 1e-2
    rms = float(change.square().mean().sqrt())
    assert 0.1 < rms < 0.3, "about 0.2 of the rate"
    values = torch.linalg.svdvals(change)
    assert values.max() < 3 * values.min(), (values.max(), values.min())


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_others_than_adamw_resume_to_the_bit(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    policy, optimizer = _with(kind, ranks)
    _imitate(policy, optimizer, range(1, 3))
    path = Checkpoints(tmp_path, keep=1, ranks=ranks).save(STATE, policy, optimizer)
    _imitate(policy, optimizer, range(3, 5))

    resumed, its = _with(kind, ranks, seed=7)
    Checkpoints(tmp_path, keep=1, ranks=ranks).load(path, resumed, its)
    _imitate(resumed, its, range(3, 5))

    pairs = zip(parameters_of(policy, optimizer), parameters_of(resumed, its), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_moments_of_another_optimizer_are_refused(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    policy, optimizer = _with(kind, ranks)
    _imitate(policy, optimizer, range(1, 2))
    path = Checkpoints(tmp_path, keep=1, ranks=ranks).save(STATE, policy, optimizer)
    adam = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())

    with pytest.raises(
        CheckpointError, match=r"must have the moments .*restore the learner\.optimizer"
    ):
        Checkpoints(tmp_path, keep=1, ranks=ranks).load(path, policy, adam)
