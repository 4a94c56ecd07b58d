"""Advantages against their formulas, one episode at a time in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from learner.advantages import ADVANTAGES, STD_FLOOR

REWARDS = [0.0, 1.0, 0.25, 1.0, 0.5]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    mean = _mean(REWARDS)
    std = math.sqrt(sum((r - mean) ** 2 for r in REWARDS) / (len(REWARDS) - 1))
    expected = [(r - mean) / (std + STD_FLOOR) for r in REWARDS]

    assert ADVANTAGES["grpo"](np.array(REWARDS)) == pytest.approx(expected, abs=1e-12)


def test_dr_grpo_only_centres() -> None:
    expected = [r - _mean(REWARDS) for r in REWARDS]

    assert ADVANTAGES["dr_grpo"](np.array(REWARDS)) == pytest.approx(expected, abs=1e-12)


def test_rloo_compares_with_the_other_members() -> None:
    expected = [r - _mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]

    assert ADVANTAGES["rloo"](np.array(REWARDS)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_of_equal_rewards_teaches_nothing(name: str) -> None:
    assert ADVANTAGES[name](np.full(4, 0.7)) == pytest.approx(np.zeros(4), abs=1e-9)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_of_one_teaches_nothing(name: str) -> None:
    assert ADVANTAGES[name](np.array([0.7])).tolist() == [0.0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    assert ADVANTAGES[name](np.array(REWARDS)).sum() == pytest.approx(0, abs=1e-12)
