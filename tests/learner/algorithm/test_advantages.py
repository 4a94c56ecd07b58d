"""Advantages against their formulas, one episode at a time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from configs.settings import AlgorithmSettings
from learner.algorithm.advantages import ADVANTAGES, STD_FLOOR, WHITENED_BY, BatchRewards, estimate

REWARDS = [[0.0, 1.0, 0.25, 1.0, 0.5], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
LENGTHS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 0, 7]]
BINARY = [[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]]
COMPARES_IN_GROUPS = sorted(set(ADVANTAGES) - {"reinforce_pp", "gae", "vtrace"})


def _outcomes(rewards: list[list[float]], lengths: list[list[int]] | None = None) -> BatchRewards:
    lengths = lengths or [[1] * len(group) for group in rewards]
    sizes = [len(group) for group in rewards]
    return BatchRewards(
        rewards_E=np.concatenate([np.array(group, dtype=np.float64) for group in rewards]),
        lengths_E=np.concatenate([np.array(group, dtype=np.float64) for group in lengths]),
        groups_E=np.repeat(np.arange(len(rewards)), sizes),
    )


def _advantages(
    name: str,
    rewards: list[list[float]] = REWARDS,
    lengths: list[list[int]] | None = None,
    *,
    whiten: str | None = "none",
    pass_k: int = 2,
) -> list[float]:
    settings = AlgorithmSettings.model_validate(
        {"advantage": name, "whiten": whiten, "pass_k": pass_k}
    )
    values: list[float] = estimate(_outcomes(rewards, lengths), settings).tolist()
    return values


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _by_group(formula: Callable[[list[float]], list[float]]) -> list[float]:
    return [value for group in REWARDS for value in formula(group)]


def _grpo(group: list[float]) -> list[float]:
    variance = sum((r - _mean(group)) ** 2 for r in group) / (len(group) - 1)
    return [(r - _mean(group)) / (math.sqrt(variance) + STD_FLOOR) for r in group]


def _centred(group: list[float]) -> list[float]:
    return [r - _mean(group) for r in group]


def _rloo(group: list[float]) -> list[float]:
    return [r - _mean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)]


def _whitened_over_tokens(advantages: list[float]) -> list[float]:
    lengths = [length for group in LENGTHS for length in group]
    tokens = [a for a, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    std = math.sqrt(_mean([(a - _mean(tokens)) ** 2 for a in tokens]))
    return [(a - _mean(tokens)) / (std + STD_FLOOR) for a in advantages]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    assert _advantages("grpo", whiten=None) == pytest.approx(_by_group(_grpo), abs=1e-12)


def test_dr_grpo_only_centres() -> None:
    assert _advantages("dr_grpo", whiten=None) == pytest.approx(_by_group(_centred), abs=1e-12)


def test_rloo_compares_with_the_other_members() -> None:
    assert _advantages("rloo", whiten=None) == pytest.approx(_by_group(_rloo), abs=1e-12)


def test_rloo_is_dr_grpo_times_n_over_n_minus_one() -> None:
    scaled = [a * len(g) / (len(g) - 1) for g in REWARDS for a in _centred(g)]

    assert _advantages("rloo") == pytest.approx(scaled, abs=1e-12)


def test_reinforce_pp_whitens_rewards_over_the_tokens_of_the_batch() -> None:
    expected = _whitened_over_tokens([r for group in REWARDS for r in group])

    found = _advantages("reinforce_pp", lengths=LENGTHS, whiten=None)

    assert found == pytest.approx(expected, abs=1e-12)


def test_reinforce_pp_baseline_centres_groups_and_then_whitens_the_batch() -> None:
    expected = _whitened_over_tokens(_by_group(_centred))

    found = _advantages("reinforce_pp_baseline", lengths=LENGTHS, whiten=None)

    assert found == pytest.approx(expected, abs=1e-12)


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    factor = 12 / (12 - 3)  # the middle group's three rewards are equal

    expected = [factor * a for a in _by_group(_centred)]

    assert _advantages("gpg", whiten=None) == pytest.approx(expected, abs=1e-12)


def test_gpg_is_dr_grpo_where_every_group_teaches() -> None:
    assert _advantages("gpg", BINARY) == pytest.approx(_advantages("dr_grpo", BINARY), abs=1e-12)


def test_opo_weighs_the_baseline_by_length() -> None:
    expected = []
    for rewards, lengths in zip(REWARDS, LENGTHS, strict=True):
        pairs = list(zip(rewards, lengths, strict=True))
        baseline = sum(r * length for r, length in pairs) / sum(lengths)
        expected += [r - baseline for r in rewards]

    assert _advantages("opo", lengths=LENGTHS, whiten=None) == pytest.approx(expected, abs=1e-12)


def test_opo_is_dr_grpo_where_all_lengths_are_equal() -> None:
    equal = [[7] * len(group) for group in REWARDS]

    assert _advantages("opo", lengths=equal) == pytest.approx(_by_group(_centred), abs=1e-12)


def test_opo_survives_a_group_without_a_trained_token() -> None:
    nothing = [[0] * len(group) for group in REWARDS]

    assert _advantages("opo", lengths=nothing) == pytest.approx(_by_group(_centred), abs=1e-12)


def _best_of_all_sets(group: list[float], k: int) -> list[float]:
    k = min(k, len(group))
    sets = list(combinations(range(len(group)), k))
    best = [max(group[i] for i in members) for members in sets]
    std = math.sqrt(_mean([(b - _mean(best)) ** 2 for b in best]))
    own = [
        _mean([b for members, b in zip(sets, best, strict=True) if i in members])
        for i in range(len(group))
    ]
    return [(o - _mean(best)) / (std + STD_FLOOR) for o in own]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_compares_the_sets_with_and_without_an_episode(k: int) -> None:
    expected = _by_group(lambda group: _best_of_all_sets(group, k))

    assert _advantages("pass_at_k", whiten=None, pass_k=k) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_of_right_and_wrong_is_the_closed_form(k: int) -> None:
    n, right = 6, 2
    p = 1 - math.comb(n - right, k) / math.comb(n, k)
    std = math.sqrt(p * (1 - p)) + STD_FLOOR
    wrong = 1 - p - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)

    expected = [(1 - p) / std if r else wrong / std for r in BINARY[0]]

    assert _advantages("pass_at_k", BINARY, pass_k=k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_grpo_with_the_population_standard_deviation() -> None:
    def plain(group: list[float]) -> list[float]:
        std = math.sqrt(_mean([a**2 for a in _centred(group)]))
        return [a / (std + STD_FLOOR) for a in _centred(group)]

    assert _advantages("pass_at_k", pass_k=1) == pytest.approx(_by_group(plain), abs=1e-12)


@pytest.mark.parametrize("name", COMPARES_IN_GROUPS)
@pytest.mark.parametrize("whiten", [None, "none", "group", "batch"])
def test_groups_of_equal_rewards_teach_nothing(name: str, whiten: str | None) -> None:
    found = _advantages(name, [[0.7] * 4, [0.2] * 3], whiten=whiten)

    assert found == pytest.approx([0.0] * 7, abs=1e-9)


@pytest.mark.parametrize("name", COMPARES_IN_GROUPS)
def test_a_group_of_one_teaches_nothing(name: str) -> None:
    assert _advantages(name, [[0.7]], whiten=None) == [0.0]


@pytest.mark.parametrize("name", sorted(set(COMPARES_IN_GROUPS) - {"opo"}))
def test_advantages_of_a_batch_of_like_lengths_sum_to_zero(name: str) -> None:
    assert sum(_advantages(name, whiten=None)) == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("whiten", [None, "none", "group", "batch"])
def test_the_order_of_a_batch_does_not_matter(name: str, whiten: str | None) -> None:
    settings = AlgorithmSettings.model_validate({"advantage": name, "whiten": whiten, "pass_k": 2})
    batch = _outcomes(REWARDS, LENGTHS)
    shuffled_E = np.random.default_rng(0).permutation(12)
    renamed = np.array([2, 0, 1])

    found_E = estimate(
        BatchRewards(
            rewards_E=batch.rewards_E[shuffled_E],
            lengths_E=batch.lengths_E[shuffled_E],
            groups_E=renamed[batch.groups_E[shuffled_E]],
        ),
        settings,
    )

    assert found_E == pytest.approx(estimate(batch, settings)[shuffled_E], abs=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"none"}))
def test_whitening_by_batch_gives_tokens_mean_0_and_standard_deviation_1(name: str) -> None:
    found = np.array(_advantages(name, lengths=LENGTHS, whiten="batch"))
    per_token = np.repeat(found, [length for group in LENGTHS for length in group])

    assert per_token.mean() == pytest.approx(0, abs=1e-10)
    assert per_token.std() == pytest.approx(1, abs=1e-3)  # short of 1 by the floor


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"none"}))
def test_whitening_by_group_gives_each_group_its_own_scale(name: str) -> None:
    found = np.array(_advantages(name, whiten="group", pass_k=2))

    for members in (slice(0, 5), slice(8, 12)):
        assert found[members].mean() == pytest.approx(0, abs=1e-10)
        assert found[members].std(ddof=1) == pytest.approx(1, abs=2e-3)


def test_whitening_by_group_makes_grpo_of_every_group_baseline() -> None:
    for name in ("dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "opo"):
        assert _advantages(name, whiten="group") == pytest.approx(_by_group(_grpo), abs=1e-10)


def test_what_a_paper_whitens_by_is_a_known_scope_of_a_known_advantage() -> None:
    assert set(WHITENED_BY) <= set(ADVANTAGES)
    for name, scope in WHITENED_BY.items():
        assert _advantages(name, whiten=None) == _advantages(name, whiten=scope)


def test_a_batch_without_a_trained_token_is_whitened_to_finite_numbers() -> None:
    nothing = [[0] * len(group) for group in REWARDS]

    found = _advantages("reinforce_pp", lengths=nothing, whiten="batch")

    assert all(math.isfinite(value) for value in found)
