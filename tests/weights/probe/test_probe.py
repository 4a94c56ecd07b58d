"""The probe: which tokens, and what of it is accepted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from actors.weights.probe import FLOORS, Difference, ProbeJudge
from broker.protocol.manifest import Probe
from learner.model.policy import Policy, probe_logprobs, probe_scores, rounded_logprobs
from learner.weights.probe import PolicyProbe
from tests.learner.support.tiny_policy import VOCABULARY, tiny_causal_lm, tiny_policy
from tests.weights.support.probe_study import run_case

BF16 = "bfloat16"


def make(policy: Policy, num_tokens: int) -> PolicyProbe:
    score = partial(probe_scores, policy)
    rounded = partial(rounded_logprobs, policy, dtype=torch.float32)
    return PolicyProbe(score, rounded, num_tokens=num_tokens, vocabulary=VOCABULARY)


def test_the_tokens_are_those_that_the_policy_draws_one_after_the_other() -> None:
    probe = make(tiny_policy(), 12)
    plain = tiny_causal_lm()
    numbers = probe._numbers

    made = probe()

    ids = [made.token_ids[0]]
    expected = []
    for number in numbers:
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        shares = logits.softmax(-1)
        ids.append(int((shares.cumsum(-1) < number).sum()))
        expected.append(float(shares[ids[-1]].log()))
    assert made.token_ids == tuple(ids)
    assert made.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_tokens_follow_the_policy_with_one_pass_for_each_version() -> None:
    passes, rounded = [], []

    def score(token_ids, numbers):
        passes.append(token_ids)
        return [0.0] * len(numbers), [len(passes)] * len(numbers)

    def once_more(token_ids):
        rounded.append(token_ids)
        return [0.1, -0.1, 0.4]

    probe = PolicyProbe(score, once_more, num_tokens=4, vocabulary=64, rounded_every=2)

    made = [probe() for _ in range(3)]

    assert len(passes) == 3 + 3
    assert [each.token_ids[1:] for each in made] == [(3, 3, 3), (4, 4, 4), (5, 5, 5)]
    assert rounded == [made[0].token_ids, made[2].token_ids]
    for each in made:
        assert (each.rounding_mean, each.rounding_max) == (pytest.approx(0.2), 0.4)


def test_rounding_is_that_of_the_coarser_dtype_and_ends_with_its_measurement() -> None:
    policy, wide = tiny_policy().bfloat16(), tiny_policy()
    ids = make(wide, 12)().token_ids

    moved = [
        Difference.of(rounded_logprobs(each, ids, dtype=dtype), probe_logprobs(each, ids))
        for each, dtype in (
            (policy, torch.bfloat16),
            (policy, torch.float32),
            (wide, torch.bfloat16),
            (wide, torch.float32),
        )
    ]

    assert 1e-3 < moved[0].mean < 0.3
    assert moved[1] == moved[0]
    assert moved[0].mean / 3 < moved[2].mean < moved[0].mean * 3
    assert 0 < moved[3].mean < 1e-5
    assert probe_logprobs(policy, ids) == probe_logprobs(policy, ids)


def probe_with(mean: float, largest: float) -> Probe:
    return Probe((), (), mean, largest)


def test_the_first_version_calibrates_the_bound_of_the_later_ones() -> None:
    judge, probe = ProbeJudge(None), probe_with(0.1, 0.4)
    assert judge.bound(probe, BF16) == about(0.6, 4.8)

    assert judge.accepts(Difference(0.15, 0.3), probe, BF16)

    assert judge.bound(probe, BF16) == about(0.45, 3.6)
    assert judge.bound(probe_with(0.2, 0.4), BF16) == about(0.9, 3.6)
    assert judge.accepts(Difference(0.44, 3.5), probe, BF16)
    assert not judge.accepts(Difference(0.46, 0.2), probe, BF16)
    assert not judge.accepts(Difference(0.1, 3.7), probe, BF16)
    assert judge.bound(probe, BF16) == about(0.45, 3.6)


def about(mean: float, largest: float) -> Any:
    near: Any = pytest.approx
    return Difference(near(mean), near(largest))


@pytest.mark.parametrize(("shown", "factor"), [(0.01, 3.0), (0.3, 6.0)])
def test_a_first_version_calibrates_within_limits(shown: float, factor: float) -> None:
    judge, probe = ProbeJudge(None), probe_with(0.1, 0.4)
    judge.accepts(Difference(shown, 0.1), probe, BF16)

    assert judge.bound(probe, BF16) == about(0.1 * factor, 0.8 * factor)


def test_a_policy_that_hardly_rounds_may_show_the_floor() -> None:
    judge = ProbeJudge(None)
    judge.accepts(Difference(0.0, 0.0), probe_with(0.0, 0.0), BF16)

    assert judge.bound(probe_with(1e-4, 1e-3), BF16) == FLOORS[BF16]


def test_a_wrong_first_version_calibrates_nothing() -> None:
    judge, probe = ProbeJudge(None), probe_with(0.1, 0.4)

    assert not judge.accepts(Difference(0.7, 0.8), probe, BF16)
    assert judge.bound(probe, BF16) == about(0.6, 4.8)


def test_a_tolerance_of_ones_own_bounds_the_largest_difference_alone() -> None:
    judge, probe = ProbeJudge(0.5), probe_with(10.0, 10.0)

    assert judge.accepts(Difference(0.4, 0.5), probe, "float32")
    assert not judge.accepts(Difference(0.1, 0.6), probe, BF16)


@pytest.mark.parametrize("theirs", [(1.0,), (1.0, math.nan)])
def test_what_cannot_be_compared_is_infinitely_far(theirs) -> None:
    assert Difference.of((1.0, 2.0), theirs).mean == math.inf
    assert Difference.of((1.0, 2.5), (1.5, 2.5)) == Difference(0.25, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "learner"), [(3, None), (6, None), (12, torch.float32), (29, torch.float32)]
)
def test_right_engines_are_accepted_and_wrong_ones_refused(
    number: int, learner: torch.dtype | None
) -> None:
    """Two cases of `python -m tests.weights.support.probe_study`, of which 200 are run by hand."""
    case = run_case(number, learner=learner)

    assert case.refused == 0
    assert case.missed == []
    assert len(case.faults) > 0
