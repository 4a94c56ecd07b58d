"""The probe: which tokens, and what of it is accepted."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from actors.weights.probe import FLOORS, LogprobDifference, ProbeJudge
from broker.protocol.manifest import Probe
from learner.model.policy import Policy, probe_logprobs, probe_scores, rounded_logprobs
from learner.weights.probe import NUM_ROUNDED, PolicyProbe
from tests.learner.support.tiny_policy import VOCABULARY, tiny_causal_lm, tiny_policy
from tests.weights.support.probe_study import run_case

BF16 = "bfloat16"


def make(policy: Policy, num_tokens: int) -> PolicyProbe:
    score = partial(probe_scores, policy)
    rounded = partial(rounded_logprobs, policy, dtype=torch.float32)
    return PolicyProbe(score, rounded, num_tokens=num_tokens, vocabulary=VOCABULARY)


def test_every_other_token_is_the_one_that_the_policy_draws_after_those_before() -> None:
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
        place = len(ids)
        is_drawn = place % 2 == 1
        drawn = int((shares.cumsum(-1) < number).sum())
        ids.append(drawn if is_drawn else (11 + 7919 * place) % VOCABULARY)
        expected.append(float(shares[ids[-1]].log()))
    assert made.token_ids == tuple(ids)
    assert made.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_tokens_follow_the_policy_with_one_pass_for_each_version() -> None:
    passes, rounded = [], []

    def score(token_ids, numbers):
        passes.append(token_ids)
        return [0.0] * len(numbers), [len(passes)] * len(numbers)

    def once_more(token_ids, seed):
        rounded.append((token_ids, seed))
        return [0.1, -0.1, 0.1 + 0.3 * seed]

    probe = PolicyProbe(score, once_more, num_tokens=4, vocabulary=64, rounded_every=2)

    made = [probe() for _ in range(3)]

    assert len(passes) == 3 + 3
    assert [each.token_ids[1:] for each in made] == [(3, 41, 3), (4, 41, 4), (5, 41, 5)]
    assert rounded == [(made[n].token_ids, seed) for n in (0, 2) for seed in range(NUM_ROUNDED)]
    mean, largest = 0.1 + 0.1 * (NUM_ROUNDED - 1) / 2, 0.1 + 0.3 * (NUM_ROUNDED - 1)
    for each in made:
        assert (each.rounding_mean, each.rounding_max) == (
            pytest.approx(mean),
            pytest.approx(largest),
        )


def test_each_pass_rounds_otherwise() -> None:
    policy = tiny_policy()
    ids = make(policy, 12)().token_ids

    found = [rounded_logprobs(policy, ids, seed, dtype=torch.bfloat16) for seed in (0, 1, 0)]

    assert found[0] == found[2] != found[1]


def test_rounding_is_that_of_the_coarser_dtype_and_ends_with_its_measurement() -> None:
    policy, wide = tiny_policy().bfloat16(), tiny_policy()
    ids = make(wide, 12)().token_ids

    moved = [
        LogprobDifference.from_logprobs(
            rounded_logprobs(each, ids, dtype=dtype), probe_logprobs(each, ids)
        )
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


def test_every_layer_rounds_and_logits_do_unless_they_have_a_dtype_of_their_own() -> None:
    policy = tiny_policy()
    ids = make(policy, 12)().token_ids
    own = probe_logprobs(policy, ids)
    moved = LogprobDifference.from_logprobs(
        rounded_logprobs(policy, ids, dtype=torch.bfloat16), own
    )
    softmax = policy.softmax

    policy.softmax = replace(softmax, dtype=torch.float32)
    with_wide_logits = LogprobDifference.from_logprobs(
        rounded_logprobs(policy, ids, dtype=torch.bfloat16), own
    )
    last = policy.causal_lm.base_model.layers[-1]
    last.forward = lambda states, *_, **__: torch.zeros_like(states)  # and all before it
    own = probe_logprobs(policy, ids)
    without_layers = LogprobDifference.from_logprobs(
        rounded_logprobs(policy, ids, dtype=torch.bfloat16), own
    )

    assert moved.mean != with_wide_logits.mean
    assert with_wide_logits.mean > 0
    assert without_layers.mean < with_wide_logits.mean / 2
    assert policy.softmax.dtype == torch.float32
    assert not any(module._forward_hooks for module in policy.modules())


def probe_with(mean: float, largest: float) -> Probe:
    return Probe((), (), mean, largest)


def test_an_engine_may_show_three_times_the_learners_rounding() -> None:
    judge, probe = ProbeJudge(None), probe_with(0.1, 0.4)

    assert judge.bound(probe, BF16) == about(0.3, 2.4)
    assert judge.bound(probe_with(0.2, 0.4), BF16) == about(0.6, 2.4)


def about(mean: float, largest: float) -> Any:
    near: Any = pytest.approx
    return LogprobDifference(near(mean), near(largest))


def test_a_policy_that_hardly_rounds_may_show_the_floor() -> None:
    assert ProbeJudge(None).bound(probe_with(1e-4, 1e-3), BF16) == FLOORS[BF16]


def test_a_tolerance_of_ones_own_bounds_the_largest_difference_alone() -> None:
    judge, probe = ProbeJudge(0.5), probe_with(10.0, 10.0)

    assert judge.is_fixed
    assert judge.bound(probe, "float32") == judge.bound(probe, BF16) == LogprobDifference(0.5, 0.5)


@pytest.mark.parametrize("theirs", [(1.0,), (1.0, math.nan)])
def test_what_cannot_be_compared_is_infinitely_far(theirs) -> None:
    assert LogprobDifference.from_logprobs((1.0, 2.0), theirs).mean == math.inf
    assert LogprobDifference.from_logprobs((1.0, 2.5), (1.5, 2.5)) == LogprobDifference(0.25, 0.5)


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
