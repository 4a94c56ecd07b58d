"""Coefficients that follow a target, against their formulas and in a closed loop."""

from __future__ import annotations

import pytest

from learner.training.controllers import adapt_entropy_bonus, adapt_kl_coefficient


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
