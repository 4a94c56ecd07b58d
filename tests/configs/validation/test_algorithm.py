"""Choices of the mathematics that do not go together are refused, with a way out."""

import pytest
from pydantic import ValidationError

from configs.settings import Settings


def load(algorithm, **run):
    return Settings.model_validate(
        {"run": {"model": "init", "max_policy_lag": 2, **run}, "algorithm": algorithm}
    )


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (
            {"proximal": "recomputed", "correction": "none"},
            "the ratio to the policy that sampled would be dropped: take tis",
        ),
        (
            {"proximal": "interpolated", "correction": "none"},
            "algorithm.correction must weigh prox/mu",
        ),
        (
            {"ignore_behaviour": True},
            "algorithm.ignore_behaviour must be false with algorithm.correction tis",
        ),
        (
            {"proximal": "interpolated", "num_epochs": 2},
            "its anchor would move with the policy from step to step",
        ),
        (
            {"proximal": "interpolated", "num_minibatches": 2},
            "algorithm.num_epochs x algorithm.num_minibatches must be 1",
        ),
        *(
            (
                {"surrogate": surrogate, "proximal": "recomputed"},
                f"algorithm.proximal must be behaviour with algorithm.surrogate {surrogate}",
            )
            for surrogate in ("topr", "m2po", "dppo_tv", "dppo_kl")
        ),
        ({"surrogate": "topr"}, "algorithm.correction must be none with algorithm.surrogate topr"),
        (
            {"correction": "seq_tis"},
            "algorithm.surrogate must be reinforce with algorithm.correction seq_tis",
        ),
        (
            {"correction": "seq_mis", "surrogate": "gspo"},
            "about the product of an episode's ratios",
        ),
        (
            {"rho_bar": 1.2},
            "algorithm.rho_bar must be > 1 + algorithm.clip_high = 1.28, got 1.2",
        ),
        (
            {"surrogate": "cispo"},
            "algorithm.rho_bar must be > 1 + algorithm.clip_high = 5.0, got 2.0",
        ),
        (
            {"surrogate": "gspo", "dual_clip": 3},
            "algorithm.dual_clip must be null with algorithm.surrogate gspo",
        ),
        ({"dual_clip": 1.1}, "algorithm.dual_clip must be > 1 + algorithm.clip_high = 1.28"),
        ({"mask_low": 1.5}, "algorithm.mask_low and algorithm.mask_high must have 1 between them"),
        ({"geo_high": 0.9}, "tokens on which both policies agree would be left out"),
        (
            {"parameters": {"tau": 1}},
            "algorithm.parameters must be empty without a function of yours, got tau",
        ),
        ({"num_minibatches": 9}, "algorithm.num_minibatches must be <= run.groups_per_batch = 8"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(algorithm, reason):
    with pytest.raises(ValidationError) as refusal:
        load(algorithm, groups_per_batch=8)

    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"proximal": "recomputed", "num_epochs": 4, "num_minibatches": 4},
        {"proximal": "recomputed", "correction": "none", "ignore_behaviour": True},
        {"proximal": "interpolated"},
        {"correction": "none", "surrogate": "topr"},
        {"correction": "seq_tis", "surrogate": "reinforce"},
        {"correction": "none", "surrogate": "cispo"},
        {"correction": "none", "dual_clip": 3},
        {"surrogate": "m2po", "correction": "none"},
        {"surrogate": "mine.py:f", "parameters": {"tau": 1}, "dual_clip": 3},
        {"correction": "module.below:f", "proximal": "recomputed"},
        {"advantage": "a-package/f", "filter_zero_variance": True},
    ],
)
def test_what_goes_together_loads(algorithm):
    load(algorithm)


def test_without_lag_there_is_no_ratio_to_drop():
    load({"proximal": "recomputed", "correction": "none"}, max_policy_lag=0)


@pytest.mark.parametrize(
    ("algorithm", "bounds"),
    [
        ({}, (0.2, 0.28)),
        ({"surrogate": "gspo"}, (3e-4, 4e-4)),
        ({"surrogate": "gmpo", "clip_high": 0.5}, (0.4, 0.5)),
        ({"surrogate": "reinforce"}, (0.2, 0.28)),
    ],
)
def test_a_surrogate_brings_its_own_bounds(algorithm, bounds):
    settings = load(algorithm).algorithm

    assert (settings.clip_low, settings.clip_high) == bounds
