"""What is refused of a function of the user, with which sentence, and what is not refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.errors import SettingsError
from configs.settings import AlgorithmSettings
from learner.algorithm.advantages import ADVANTAGES, BatchRewards
from learner.algorithm.corrections import CORRECTIONS, Corrected
from learner.algorithm.loss_checks import check_advantage, check_correction, check_surrogate
from learner.algorithm.microbatch import Segments
from learner.algorithm.surrogates import SURROGATES, Objective, Terms
from learner.algorithm.user_losses import check_loss

CPU = torch.device("cpu")
PROXIMALS = ("behaviour", "recomputed", "interpolated")
Array = np.ndarray[Any, Any]


def _assert_refused(check: Callable[[], None], kind: str, words: str) -> None:
    """The sentence names setting and function, says what is wrong, and ends with a next step."""
    with pytest.raises(SettingsError) as refused:
        check()
    text = str(refused.value)
    assert re.match(rf"algorithm\.{kind} must .+, got 'mine\.py:f', .+; .+", text), text
    assert re.search(words, text), text


def _objective(values_N: Any) -> Objective:
    shape = getattr(values_N, "shape", ())
    never_N = torch.zeros(shape, dtype=torch.bool)
    return Objective(values_N, lambda: (never_N, never_N))


def _check_surrogate(
    values: Callable[[Tensor, Tensor, Terms], Any],
    *,
    may_ignore_ratio: bool = False,
    **settings: Any,
) -> None:
    """Check a surrogate that is given as a function of ratio and advantage."""

    def surrogate(terms: Terms, _settings: AlgorithmSettings) -> Objective:
        return _objective(values(terms.log_ratios_N.exp(), terms.advantages_N, terms))

    check_surrogate(
        surrogate,
        "mine.py:f",
        AlgorithmSettings.model_validate(settings),
        may_ignore_ratio=may_ignore_ratio,
        device=CPU,
    )


def _moving(terms: Terms) -> Tensor:
    """1 with the gradient of log(pi)."""
    return (terms.log_ratios_N - terms.log_ratios_N.detach()).exp()


def _ppo(r: Tensor, a: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


# --------------------------------------------------------------------------------------------------
# Surrogates.

WRONG_SURROGATES: dict[str, tuple[Callable[[Tensor, Tensor, Terms], Any], str]] = {
    "the loss for the objective": (lambda r, a, t: -_ppo(r, a), "sign is turned"),
    "max for min": (
        lambda r, a, t: torch.maximum(-r * a, -r.clamp(0.8, 1.2) * a),
        "sign is turned",
    ),
    "the size of the advantage": (
        lambda r, a, t: r * a.abs(),
        "makes tokens of negative advantage more likely",
    ),
    "the square of the ratio": (lambda r, a, t: r**2 * a, "pi/mu counts twice"),
    "the ratio as a weight, too": (lambda r, a, t: r.detach() * _ppo(r, a), "counts twice"),
    "a truncated weight, too": (
        lambda r, a, t: r.detach().clamp(max=2) * _ppo(r, a, 0.2, 0.28),
        "counts twice",
    ),
    "a weight truncated at 1, too": (lambda r, a, t: r.detach().clamp(max=1) * r * a, "twice"),
    "a weight of the policies, too": (
        lambda r, a, t: (t.log_pi_N - t.log_anchor_N).exp() * _ppo(r, a),
        "counts twice",
    ),
    "detached": (lambda r, a, t: r.detach() * a, "must have a gradient, .* are detached"),
    "log(pi) without a gradient": (lambda r, a, t: r.detach() * a * t.log_pi_N, "are detached"),
    "no gradient at 1": (lambda r, a, t: (r - 1) ** 2 * a, "gradient at a ratio of 1"),
    "a sum": (lambda r, a, t: (r * a).sum(), r"shape \(11,\), got .*returns \(\); leave sums"),
    "one for each episode": (lambda r, a, t: (r * a)[:4], r"which returns \(4,\); leave sums"),
    "no tensor": (lambda r, a, t: 0.5, "which returns None; leave sums"),
    "nan where the advantage is 0": (
        lambda r, a, t: r * a**2 / a,
        r"must be finite, .* value is nan",
    ),
    "nan where a policy is certain": (
        lambda r, a, t: r * a * t.log_pi_N / t.log_pi_N,
        "must be finite, .*one such token spoils the weights",
    ),
    "infinite far from 1": (
        lambda r, a, t: r * a * (100 * t.log_ratios_N.detach().abs()).exp(),
        "must be finite",
    ),
    "the ratio to itself": (lambda r, a, t: _moving(t) * a, "pi/mu would be dropped"),
    "its clip": (lambda r, a, t: _ppo(_moving(t), a), "the same for every ratio"),
    "log(ratio) for the ratio": (lambda r, a, t: t.log_ratios_N * a, "pi/mu would be dropped"),
    "a mean over the microbatch": (
        lambda r, a, t: r / r.detach().mean() * a,
        "must treat each episode alone",
    ),
    "no token": (
        lambda r, a, t: r.clamp(max=float(r.detach().max())) * a,
        "must take a microbatch of 0 tokens, .* raises RuntimeError: max",
    ),
    "another number of tokens": (
        lambda r, a, t: r * a[:3],
        "must take a microbatch of 11 tokens, ",
    ),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG_SURROGATES.values(), ids=WRONG_SURROGATES)
@pytest.mark.parametrize("proximal", PROXIMALS)
def test_a_wrong_surrogate_is_refused(
    wrong: Callable[[Tensor, Tensor, Terms], Any], words: str, proximal: str
) -> None:
    _assert_refused(lambda: _check_surrogate(wrong, proximal=proximal), "surrogate", words)


def _vespo(r: Tensor, a: Tensor, terms: Terms) -> Tensor:
    log_w = terms.segments.sum(terms.log_ratios_N.detach())
    k, scale = torch.where(a > 0, 2.0, 3.0), torch.where(a > 0, 3.0, 2.0)
    return (scale * (1 - log_w.exp()) + k * log_w).exp() * a * _moving(terms)


RIGHT_SURROGATES: dict[str, Callable[[Tensor, Tensor, Terms], Tensor]] = {
    "SAPO": lambda r, a, t: (
        4 * (torch.where(a > 0, 1.0, 1.05) * (r - 1)).sigmoid() / torch.where(a > 0, 1.0, 1.05) * a
    ),
    "SAPO, narrow": lambda r, a, t: (10 * (r - 1)).sigmoid() / 2.5 * a,
    "VESPO": _vespo,
    "SPO": lambda r, a, t: r * a - a.abs() / 0.4 * (r - 1) ** 2,
    "ASPO": lambda r, a, t: torch.where(a > 0, 1 / r.detach(), r.detach()) * a * _moving(t),
    "sPPO": lambda r, a, t: a * r.clamp(0.8, 1.2).log(),
    "a mirror of the ratio": lambda r, a, t: torch.minimum(r, 1 / r).detach() * r * a,
    "good tokens only": lambda r, a, t: r * a.clamp(min=0),
    "bad tokens only": lambda r, a, t: r * a.clamp(max=0),
    "good tokens at a tenth": lambda r, a, t: r * torch.where(a > 0, 0.1 * a, a),
    "squared log-ratio": lambda r, a, t: a * t.log_ratios_N - 0.1 * t.log_ratios_N**2,
    "KL to mu": lambda r, a, t: r * a - 0.2 * (r * t.log_ratios_N - r + 1),
    "tempered": lambda r, a, t: 2 * r.sqrt() * a,
    "truncated at 1": lambda r, a, t: r.detach().clamp(max=1) * _moving(t) * a,
    "in single precision": lambda r, a, t: _ppo(t.log_ratios_N.float().exp(), a.float()),
}


@pytest.mark.parametrize("right", RIGHT_SURROGATES.values(), ids=RIGHT_SURROGATES)
@pytest.mark.parametrize("proximal", PROXIMALS)
def test_no_other_trust_region_is_refused(
    right: Callable[[Tensor, Tensor, Terms], Tensor], proximal: str
) -> None:
    _check_surrogate(right, proximal=proximal)


@pytest.mark.parametrize("kind", ["surrogate", "correction", "advantage"])
@pytest.mark.parametrize("proximal", PROXIMALS)
def test_nothing_of_ours_is_refused(kind: str, proximal: str) -> None:
    tables: dict[str, dict[str, Any]] = {
        "surrogate": SURROGATES,
        "correction": CORRECTIONS,
        "advantage": {key: f for key, f in ADVANTAGES.items() if key != "none"},
    }
    for name, function in tables[kind].items():
        settings = AlgorithmSettings.model_validate({kind: name, "proximal": proximal})
        check_loss(kind, function, settings, max_policy_lag=2)


def test_the_ratio_may_be_left_out_where_it_is_1() -> None:
    def surrogate(terms: Terms, _settings: AlgorithmSettings) -> Objective:
        return _objective(_moving(terms) * terms.advantages_N)

    def check(lag: int, **settings: Any) -> None:
        named = AlgorithmSettings.model_validate({"surrogate": "mine.py:f", **settings})
        check_loss("surrogate", surrogate, named, lag)

    check(0)
    check(2, proximal="recomputed")
    for lag, settings in (
        (2, {}),
        (0, {"num_minibatches": 2}),
        (2, {"proximal": "recomputed", "num_epochs": 2}),
        (2, {"proximal": "interpolated"}),
    ):
        with pytest.raises(SettingsError, match="must weigh a token by its ratio"):
            check(lag, **settings)


def test_a_surrogate_that_returns_no_objective_is_refused() -> None:
    def plain(terms: Terms, _settings: AlgorithmSettings) -> Any:
        return terms.log_ratios_N.exp() * terms.advantages_N

    def one_mask(terms: Terms, _settings: AlgorithmSettings) -> Any:
        values_N = terms.log_ratios_N.exp() * terms.advantages_N
        outside: Any = lambda: values_N > 1  # noqa: E731
        return Objective(values_N, outside)

    for function, words in (
        (plain, r"got 'mine.py:f', which returns Tensor; return Objective\(values_N, outside\)"),
        (one_mask, r"whose `outside` returns two masks of shape \(11,\), got 'mine.py:f'"),
    ):
        with pytest.raises(SettingsError, match=words):
            check_surrogate(
                function, "mine.py:f", AlgorithmSettings(), may_ignore_ratio=False, device=CPU
            )


# --------------------------------------------------------------------------------------------------
# Corrections.


def _check_correction(correction: Callable[[Tensor, Segments], Any], **settings: Any) -> None:
    check_correction(
        lambda x, segments, _: correction(x, segments),
        "mine.py:f",
        AlgorithmSettings.model_validate(settings),
        may_ignore_ratio=False,
        device=CPU,
    )


def _all(log_rhos_N: Tensor) -> Tensor:
    return torch.ones_like(log_rhos_N, dtype=torch.bool)


def _with_value(log_rhos_N: Tensor, values_N: Tensor) -> Tensor:
    return values_N.detach() + log_rhos_N - log_rhos_N.detach()


WRONG_CORRECTIONS: dict[str, tuple[Callable[[Tensor, Segments], Any], str]] = {
    "turned": (lambda x, s: Corrected(-x, _all(x)), "sign is turned: it weighs by mu/pi"),
    "turned value": (lambda x, s: Corrected(_with_value(x, -x), _all(x)), "sign is turned"),
    "twice": (lambda x, s: Corrected(2 * x, _all(x)), "more than once"),
    "twice in value": (lambda x, s: Corrected(_with_value(x, 2 * x), _all(x)), "counts twice"),
    "product with its gradient": (lambda x, s: Corrected(s.sum(x), _all(x)), "more than once"),
    "detached": (lambda x, s: Corrected(x.detach(), _all(x)), "are detached from the ratios"),
    "detached by a sum": (lambda x, s: Corrected(x.detach() + 0 * x, _all(x)), "is detached from"),
    "one for each episode": (
        lambda x, s: Corrected(x[: s.num_episodes], _all(x)),
        r"shape \(11,\), got .*returns \(4,\) and \(11,\)",
    ),
    "a mask of numbers": (lambda x, s: Corrected(x, torch.ones_like(x)), "a boolean for each"),
    "nan": (lambda x, s: Corrected((x - 1).sqrt().log() + x, _all(x)), "must be finite"),
    "infinite": (
        lambda x, s: Corrected(_with_value(x, (x.exp() - 1e-5).log()), _all(x)),
        "whose log.u. is nan at a token that it keeps, with log-ratios up to 12",
    ),
    "1": (lambda x, s: Corrected(_with_value(x, 0 * x), _all(x)), "pi/mu would be dropped"),
    "1 for some": (lambda x, s: Corrected(_with_value(x, 0 * x), x.abs() < 0.3), "be dropped"),
    "nothing kept": (lambda x, s: Corrected(x, ~_all(x)), "must keep tokens on which both"),
    "by the microbatch": (
        lambda x, s: Corrected(_with_value(x, x - x.exp().mean().log()), _all(x)),
        "must treat each episode alone",
    ),
    "no token": (
        lambda x, s: Corrected(x.clamp(max=float(x.detach().max())), _all(x)),
        "must take a microbatch of 0 tokens",
    ),
    "a tensor": (lambda x, s: x, "which returns Tensor; return Corrected"),
    "an error": (lambda x, s: Corrected(x + x[:3], _all(x)), "raises RuntimeError: The size of"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG_CORRECTIONS.values(), ids=WRONG_CORRECTIONS)
def test_a_wrong_correction_is_refused(
    wrong: Callable[[Tensor, Segments], Any], words: str
) -> None:
    _assert_refused(lambda: _check_correction(wrong), "correction", words)


RIGHT_CORRECTIONS: dict[str, Callable[[Tensor, Segments], Corrected]] = {
    "clamped with its gradient": lambda x, s: Corrected(x.clamp(max=0.7), _all(x)),
    "tempered": lambda x, s: Corrected(0.5 * x, _all(x)),
    "trust region of the episode": lambda x, s: Corrected(x, ~s.any(x.detach().abs() > 0.3)),
    "mean with its gradient": lambda x, s: Corrected(s.mean(x), _all(x)),
    "truncated at 1": lambda x, s: Corrected(_with_value(x, x.clamp(max=0)), _all(x)),
}


@pytest.mark.parametrize("right", RIGHT_CORRECTIONS.values(), ids=RIGHT_CORRECTIONS)
@pytest.mark.parametrize("proximal", PROXIMALS)
def test_no_other_correction_is_refused(
    right: Callable[[Tensor, Segments], Corrected], proximal: str
) -> None:
    _check_correction(right, proximal=proximal)


def test_a_correction_of_prox_needs_no_gradient() -> None:
    _check_correction(lambda x, s: Corrected(s.sum(x.detach()), _all(x)), proximal="recomputed")


# --------------------------------------------------------------------------------------------------
# Advantages.


def _centred(outcomes: BatchRewards) -> Array:
    return outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)


def _std(outcomes: BatchRewards) -> Array:
    return np.sqrt(outcomes.group_mean(_centred(outcomes) ** 2))


def _change(outcomes: BatchRewards) -> Array:
    outcomes.rewards_E[:] -= 0.5
    return outcomes.rewards_E


WRONG_ADVANTAGES: dict[str, tuple[Callable[[BatchRewards], Any], str]] = {
    "turned": (lambda o: -_centred(o), "must rise with the reward, .*sign is turned"),
    "one for each group": (lambda o: np.zeros(5), r"returns ndarray of \(5,\)"),
    "a list": (lambda o: _centred(o).tolist(), "returns list of None"),
    "a tensor": (lambda o: torch.tensor(_centred(o)), "returns Tensor of"),
    "nan": (lambda o: _centred(o) / _std(o), "must be finite, .*rewards are all equal"),
    "infinite": (lambda o: o.rewards_E / o.lengths_E, "must be finite"),
    "constant": (lambda o: np.ones_like(o.rewards_E), "must depend on the rewards"),
    "the baseline alone": (lambda o: o.group_mean(o.rewards_E), "must depend on the rewards"),
    "in place": (_change, "must be a pure function, .*changes its arguments"),
    "random": (lambda o: _centred(o) + np.random.rand(), "must be a pure function"),  # noqa: NPY002
    "groups of one size": (lambda o: o.rewards_E.reshape(-1, 4), "raises ValueError: cannot resha"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG_ADVANTAGES.values(), ids=WRONG_ADVANTAGES)
def test_a_wrong_advantage_is_refused(wrong: Callable[[BatchRewards], Any], words: str) -> None:
    def check() -> None:
        check_advantage(lambda outcomes, _: wrong(outcomes), "mine.py:f", AlgorithmSettings())

    _assert_refused(check, "advantage", words)


@pytest.mark.parametrize("pass_k", [1, 4, 7])
def test_no_other_advantage_is_refused(pass_k: int) -> None:
    settings = AlgorithmSettings(pass_k=pass_k)
    advantages: tuple[Callable[[Any, Any], Any], ...] = (
        lambda o, _: _centred(o) / (o.group_mean(o.rewards_E) + 1e-6),
        lambda o, _: np.sign(_centred(o)),
        lambda o, _: np.maximum(_centred(o), 0).astype(np.float32),
        ADVANTAGES["pass_at_k"],
    )
    for right in advantages:
        check_advantage(right, "mine.py:f", settings)
