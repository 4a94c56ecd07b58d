"""Decisions of the guards, batch by batch, from figures alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from configs.errors import DivergedError
from configs.settings import AlgorithmSettings, Settings
from learner.model.ranks import Ranks
from learner.training.divergence import DivergenceMeter
from learner.training.guards import (
    Guard,
    GuardState,
    adapt_entropy_bonus,
    adapt_kl_coefficient,
)
from learner.training.step import BatchOutcome, TrainedBatch
from tests.learner.support.tiny_run import tiny_settings

GOOD = BatchOutcome(1.0, 1e-3, optimizer_steps=1, skipped_steps=0, skipped_for_loss=0)
BAD = replace(GOOD, skipped_steps=1)


def _settings(guards: dict[str, object], **algorithm: object) -> Settings:
    whole = tiny_settings(Path("unused"), algorithm=algorithm).model_dump()
    return Settings.model_validate({**whole, "guards": guards})


def _guard(settings: Settings, state: GuardState) -> Guard:
    return Guard(settings.guards, settings.algorithm, state)


def _trained(ranks: Ranks, outcome: BatchOutcome = GOOD, **figures: Any) -> TrainedBatch:
    """Make what training a batch showed: on policy but for these figures."""
    divergence = DivergenceMeter(AlgorithmSettings(), ranks.device).merge(ranks)
    return TrainedBatch(
        loss=0.0,
        outcome=outcome,
        divergence=replace(divergence, **figures),
        kl_coefficient=0.0,
        entropy_bonus=0.0,
    )


def _names(guard: Guard, trained: TrainedBatch) -> list[str]:
    return [alert.name for alert in guard.watch(trained)]


def test_skipped_batches_in_a_row_lead_to_a_rollback_and_then_to_an_error(ranks: Ranks) -> None:
    guard = _guard(_settings({"max_skipped_in_a_row": 2, "max_rollbacks": 1}), GuardState())

    assert _names(guard, _trained(ranks, BAD)) == ["skipped"]
    assert guard.has_skipped_step and not guard.must_roll_back
    assert _names(guard, _trained(ranks, GOOD)) == []
    assert not guard.has_skipped_step
    assert _names(guard, _trained(ranks, BAD)) == ["skipped"]
    assert _names(guard, _trained(ranks, BAD)) == ["skipped", "rollback"]
    assert guard.must_roll_back
    guard.rolled_back(6)
    assert not guard.must_roll_back
    assert guard.has_skipped_step, "no good batch yet: a checkpoint now would push older ones out"

    guard.watch(_trained(ranks, BAD))
    with pytest.raises(DivergedError, match=r"within guards\.max_rollbacks = 1, got 2 more"):
        guard.watch(_trained(ranks, BAD))


def test_each_rollback_lowers_learning_rate_and_clip_bounds(ranks: Ranks) -> None:
    settings = _settings({"rollback_lr_factor": 0.5, "rollback_clip_factor": 0.8})
    guard = _guard(settings, GuardState())
    assert (guard.lr_scale, guard.algorithm) == (1.0, settings.algorithm)

    guard.rolled_back(4)
    guard.rolled_back(2)

    assert guard.lr_scale == pytest.approx(0.25)
    assert guard.algorithm.clip_low == pytest.approx(0.64 * settings.algorithm.clip_low)
    assert guard.algorithm.clip_high == pytest.approx(0.64 * settings.algorithm.clip_high)
    assert guard.algorithm.rho_bar == settings.algorithm.rho_bar


def test_a_second_rollback_goes_further_back_until_there_is_a_newer_checkpoint(
    ranks: Ranks,
) -> None:
    guard = _guard(_settings({}), GuardState())
    guard.watch(_trained(ranks, BAD))
    guard.rolled_back(6)
    guard.checkpoints()  # Redis was crowded: its weights are those of step 6 again
    assert guard.state.restored_step == 6

    guard.watch(_trained(ranks))
    guard.checkpoints()

    assert guard.state.restored_step is None


def test_kl_above_its_bound_lowers_the_learning_rate_down_to_a_floor_until_it_recovers(
    ranks: Ranks,
) -> None:
    guard = _guard(
        _settings({"max_kl": 0.1, "kl_lr_factor": 0.5, "kl_lr_floor": 0.2, "kl_lr_recovery": 1.5}),
        GuardState(),
    )

    scales = []
    for kl in (0.1, 0.11, 0.3, 0.3, 0.05, 0.05, 0.05, 0.05, 0.05):
        alerts = _names(guard, _trained(ranks, kl_pi_mu_k3=kl))
        assert alerts == (["kl"] if kl > 0.1 else [])
        scales.append(guard.lr_scale)

    assert scales == pytest.approx([1.0, 0.5, 0.25, 0.2, 0.3, 0.45, 0.675, 1.0, 1.0])


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, []),
        ({"effective_sample_size": 0.29}, ["ess"]),
        ({"effective_sample_size": float("nan")}, ["ess"]),
        ({"ratio_mean": 2.1}, ["ratio_mean"]),
        ({"ratio_mean": 0.4}, ["ratio_mean"]),
        ({"ratio_max": 51.0}, ["ratio"]),
        ({"ratio_max": 49.0}, []),
    ],
)
def test_ratios_out_of_bounds_raise_an_alert(
    ranks: Ranks, figures: dict[str, Any], expected: list[str]
) -> None:
    guard = _guard(_settings({"max_ratio": 50}), GuardState())

    assert _names(guard, _trained(ranks, **figures)) == expected


def test_coefficients_follow_their_targets(ranks: Ranks) -> None:
    settings = _settings(
        {}, kl_coefficient=0.1, kl_target=0.02, entropy_bonus=0.01, entropy_target=0.4
    )
    guard = _guard(settings, GuardState())
    assert guard.algorithm == settings.algorithm

    coefficient, bonus = 0.1, 0.01
    for kl, entropy in ((0.03, 0.3), (0.01, 0.5), (0.021, 0.1)):
        guard.watch(_trained(ranks, kl_pi_ref_k3=kl, entropy=entropy))
        coefficient = adapt_kl_coefficient(coefficient, kl, target=0.02)
        bonus = adapt_entropy_bonus(bonus, entropy, target=0.4, step=0.005)

        assert guard.algorithm.kl_coefficient == pytest.approx(coefficient)
        assert guard.algorithm.entropy_bonus == pytest.approx(bonus)


def test_a_skipped_batch_moves_no_coefficient(ranks: Ranks) -> None:
    guard = _guard(_settings({"max_kl": 0.1}, kl_coefficient=0.1, kl_target=0.02), GuardState())

    guard.watch(_trained(ranks, BAD, kl_pi_ref_k3=9.0, kl_pi_mu_k3=9.0))

    assert (guard.algorithm.kl_coefficient, guard.lr_scale) == (0.1, 1.0)


def test_a_guard_restored_from_its_state_decides_alike(ranks: Ranks) -> None:
    settings = _settings({"max_kl": 0.1}, kl_coefficient=0.1, kl_target=0.02, entropy_target=0.4)
    guard = _guard(settings, GuardState())
    batches = [
        _trained(ranks, BAD if k % 5 == 4 else GOOD, kl_pi_mu_k3=0.03 * k, kl_pi_ref_k3=0.01 * k)
        for k in range(12)
    ]
    for batch in batches[:5]:
        guard.watch(batch)
    restored = _guard(settings, convert(asdict(guard.state), GuardState))

    for batch in batches[5:]:
        assert restored.watch(batch) == guard.watch(batch)
        assert (
            restored.state,
            restored.lr_scale,
            restored.has_skipped_step,
            restored.algorithm,
        ) == (
            guard.state,
            guard.lr_scale,
            guard.has_skipped_step,
            guard.algorithm,
        )


def test_what_a_checkpoint_does_not_know_starts_anew() -> None:
    assert convert({"rollbacks": 2, "of_another_release": 1}, GuardState) == GuardState(rollbacks=2)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.11, 1.01), (0.095, 0.995), (5.0, 1.02), (0.0, 0.98), (-1.0, 0.98)],
)
def test_the_kl_coefficient_moves_by_the_clamped_relative_error(kl: float, factor: float) -> None:
    """Ziegler et al. 2019: beta (1 + 0.1 clamp((kl - target) / target, -0.2, 0.2))."""
    assert adapt_kl_coefficient(0.5, kl, target=0.1) == pytest.approx(0.5 * factor)


def test_the_kl_coefficient_settles_where_the_kl_is_on_target() -> None:
    coefficient = 10.0
    for _ in range(2000):
        # A policy that is held the closer, the heavier the penalty.
        coefficient = adapt_kl_coefficient(coefficient, 0.02 / coefficient, target=0.05)

    assert 0.02 / coefficient == pytest.approx(0.05, rel=1e-6)


def test_the_entropy_bonus_moves_by_fixed_steps_and_stops_at_zero() -> None:
    bonus = 0.012

    steps = []
    for entropy in (0.2, 0.29, 0.3, 0.5, 0.5, 0.5, 0.5):
        bonus = adapt_entropy_bonus(bonus, entropy, target=0.3, step=0.005)
        steps.append(bonus)

    assert steps == pytest.approx([0.017, 0.022, 0.017, 0.012, 0.007, 0.002, 0.0])
