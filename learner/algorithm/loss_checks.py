"""Checks of surrogates, corrections and advantages of the user, on made-up batches in float64.

Each check holds for every right function, also for one that drops tokens, rescales them or holds
ratios constant, so none compares a gradient with a formula:

    surrogate    at r = 1 the gradient of a token has the sign of its advantage; inside of any trust
                 region, that is with A > 0 and r < 1 or A < 0 and r > 1, it does not grow with r^2;
                 somewhere it depends on r
    correction   at rho = 1 the gradient of log(u) is that of log(rho), and log(u) grows at most as
                 fast as log(rho); somewhere u depends on rho
    advantage    within a group it rises with the reward

All have the shapes of their arguments, are finite, and an episode's values do not depend on the
other episodes of a microbatch.

Shapes: N tokens, E episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.errors import SettingsError
from configs.settings import AlgorithmSettings
from configs.user_code import explain

from .advantages import BatchRewards, Float64
from .corrections import Corrected, Correction
from .microbatch import Segments
from .surrogates import Objective, Surrogate, Terms

LENGTHS = (3, 1, 5, 2)
"""Tokens of the episodes of a made-up microbatch."""
NO_TOKEN = (0,)
"""The same of a microbatch that a rank adds to take part in the collectives of the others."""
ADVANTAGES = (1.0, -0.5, -2.0, 0.75)
"""Their advantages, each large enough that no small bonus outweighs it."""
INSIDE = ((1.0, 0.95), (1.0, 0.7), (1.0, 0.4), (-1.0, 1.05), (-1.0, 1.3), (-1.0, 1.8))
"""Advantages, and ratios that no trust region acts on: the policy has moved against them."""
STEP = 0.01
"""Width of finite differences of a gradient's logarithm, nats; float32 within them is exact to
1e-4."""
SMALL_STEP = 1e-4
"""The same for log(u): within every mask that keeps equal policies."""
FAR = 12.0
"""Largest |log r| that is tried, nats: within float32, and beyond any bound."""
TOLERANCE = 1e-4
"""Differences of rounding, relative, also of a function that computes in float32."""


class _Checked(NamedTuple):
    """A function under its settings, and the device of its arguments."""

    function: Callable[..., Any]
    name: str
    settings: AlgorithmSettings
    device: torch.device


# --------------------------------------------------------------------------------------------------
# Surrogates.


class _Tokens(NamedTuple):
    """Arguments of a surrogate, as plain numbers."""

    log_ratios: list[float]
    advantages: list[float]
    log_pi: list[float]
    lengths: tuple[int, ...]
    log_ratio_bound: float = math.inf


class _Slopes(NamedTuple):
    """Values of a surrogate and their gradient by each token's log(pi)."""

    values_N: Tensor
    gradient_N: Tensor


def check_surrogate(
    surrogate: Surrogate,
    name: str,
    settings: AlgorithmSettings,
    *,
    may_ignore_ratio: bool,
    device: torch.device,
) -> None:
    """Check a surrogate under the settings.

    Args:
        surrogate: The function.
        name: Its name in the settings.
        settings: Bounds and parameters.
        may_ignore_ratio: Whether r is 1 wherever the function is called.
        device: Device of its arguments.

    Raises:
        SettingsError: It is wrong; the text says what about it, and what to change.
    """
    checked = _Checked(surrogate, name, settings, device)

    def slopes(tokens: _Tokens) -> _Slopes:
        return _slopes(checked, tokens)

    num_tokens = sum(LENGTHS)
    on_policy = _Tokens([0.0] * num_tokens, _by_token(ADVANTAGES), _log_pi(), LENGTHS)
    _check_sign(name, on_policy.advantages, slopes(on_policy).gradient_N)
    no_advantage = on_policy._replace(advantages=[0.0] * num_tokens)
    for certain in (on_policy, no_advantage):
        slopes(certain._replace(log_pi=[0.0] * num_tokens))
    slopes(_Tokens([], [], [], NO_TOKEN))
    moved = on_policy._replace(log_ratios=_spread(0.5))
    far = on_policy._replace(log_ratios=_spread(FAR), log_pi=[-FAR - 1] * num_tokens)
    gradients = [slopes(tokens).gradient_N for tokens in (moved, far)]
    _check_alone(name, moved, slopes(moved), slopes)
    _check_counted_once(name, slopes)
    at_one = [slopes(t._replace(log_ratios=[0.0] * num_tokens)).gradient_N for t in (moved, far)]
    if not may_ignore_ratio and all(map(_equal, gradients, at_one)):
        raise SettingsError(
            f"algorithm.surrogate must weigh a token by its ratio, got {name!r}, whose gradient is "
            f"the same for every ratio; pi/mu would be dropped, and stale episodes trained as if "
            f"they were new: multiply by terms.log_ratios_N.exp()"
        )


def reads_ratio_bound(
    surrogate: Surrogate, settings: AlgorithmSettings, device: torch.device
) -> bool:
    """Whether a surrogate reads `Terms.log_ratio_bound`, as M2PO does."""
    values = []
    for bound in (math.inf, 0.0):
        tokens = _Tokens(_spread(0.5), _by_token(ADVANTAGES), _log_pi(), LENGTHS, bound)
        terms, _ = _terms(tokens, device)
        values.append(surrogate(terms, settings).values_N.detach())
    return not _equal(*values)


def _slopes(surrogate: _Checked, tokens: _Tokens) -> _Slopes:
    """Call a surrogate and differentiate it; refuse what is no objective of these tokens."""
    name = surrogate.name
    terms, log_ratios_N = _terms(tokens, surrogate.device)
    shape = tuple(log_ratios_N.shape)
    try:
        objective: Any = surrogate.function(terms, surrogate.settings)
        outside: Any = objective.outside() if isinstance(objective, Objective) else None
    except Exception as error:
        raise SettingsError(
            f"algorithm.surrogate must take a microbatch of {shape[0]} tokens, got {name!r}, which "
            f"raises {explain(error)}; mend it"
        ) from error
    if not isinstance(objective, Objective):
        raise SettingsError(
            f"algorithm.surrogate must return an Objective of "
            f"learner.algorithm.surrogates, got {name!r}, which returns "
            f"{type(objective).__name__}; return Objective(values_N, outside)"
        )
    values_N: Any = objective.values_N
    if _shape_of(values_N) != shape:
        raise SettingsError(
            f"algorithm.surrogate must return one value for each token, shape {shape}, got "
            f"{name!r}, which returns {_shape_of(values_N)}; leave sums and means to "
            f"algorithm.aggregation"
        )
    if _shapes_of(outside) != [shape, shape]:
        raise SettingsError(
            f"algorithm.surrogate must return an Objective whose `outside` returns two masks of "
            f"shape {shape}, got {name!r}; return the tokens that the lower bound acts on, and "
            f"those of the upper"
        )
    return _Slopes(values_N.detach(), _gradient("surrogate", name, values_N, log_ratios_N))


def _gradient(kind: str, name: str, values_N: Tensor, inputs_N: Tensor) -> Tensor:
    """Differentiate the sum of values, which have to be finite and to have a gradient."""
    if not values_N.requires_grad:
        raise SettingsError(
            f"algorithm.{kind} must have a gradient, got {name!r}, whose values have none; they "
            f"are detached from the ratios that it is given, so that nothing would be learned: "
            f"compute them from these, without `detach` or `no_grad` around all of them"
        )
    (gradient_N,) = torch.autograd.grad(values_N.sum(), inputs_N, materialize_grads=True)
    if not (values_N.isfinite().all() and gradient_N.isfinite().all()):
        at = int((~(values_N.isfinite() & gradient_N.isfinite())).nonzero()[0])
        raise SettingsError(
            f"algorithm.{kind} must be finite, got {name!r}, whose value is "
            f"{values_N[at].item():g} and whose gradient is {gradient_N[at].item():g} at a "
            f"log-ratio of {inputs_N[at].item():.3g}; one such token spoils the weights: clamp "
            f"before `log`, `exp` and divisions, and mask with torch.where before `exp`"
        )
    return gradient_N


def _check_sign(name: str, advantages: list[float], gradient_N: Tensor) -> None:
    """Check the direction of the gradient at r = 1."""
    if not gradient_N.any():
        raise SettingsError(
            f"algorithm.surrogate must have a gradient at a ratio of 1, got {name!r}, whose "
            f"gradient is 0 there; nothing would be learned from new episodes: let it carry the "
            f"gradient of terms.log_ratios_N"
        )
    wanted_N = gradient_N.new_tensor(advantages)
    gains_N = wanted_N * gradient_N
    wrong = {
        word: float(gains_N[is_of_sign].sum()) < 0
        for word, is_of_sign in (("positive", wanted_N > 0), ("negative", wanted_N < 0))
    }
    if all(wrong.values()):
        raise SettingsError(
            f"algorithm.surrogate must be maximised, got {name!r}, whose sign is turned: it makes "
            f"tokens of positive advantage less likely and those of negative advantage more; "
            f"return the objective, r A, and not the loss"
        )
    for word, is_wrong in wrong.items():
        if is_wrong:
            effect = "less" if word == "positive" else "more"
            raise SettingsError(
                f"algorithm.surrogate must push a token in the direction of its advantage, got "
                f"{name!r}, which makes tokens of {word} advantage {effect} likely; check its "
                f"sign there"
            )


def _check_counted_once(name: str, slopes: Callable[[_Tokens], _Slopes]) -> None:
    """Check that the gradient does not grow with the square of the ratio.

    Trust regions, soft ones too, bend it elsewhere and by other powers; so does a truncation, but
    only on the side of large ratios.
    """
    advantages, ratios = (list(column) for column in zip(*INSIDE, strict=True))
    logs = [math.log(ratio) for ratio in ratios]
    tokens = _Tokens(logs, advantages, [math.log(0.3)] * len(logs), (1,) * len(logs))
    below, above = (
        slopes(tokens._replace(log_ratios=[log + step for log in logs])).gradient_N.abs()
        for step in (-STEP, STEP)
    )
    if not (below.all() and above.all()):
        return
    powers_N = (above.log() - below.log()) / (2 * STEP)
    is_down_N = powers_N.new_tensor(advantages) > 0
    if ((powers_N[is_down_N] - 2).abs() < 0.25).all() and (powers_N[~is_down_N] > 0.6).all():
        raise SettingsError(
            f"algorithm.surrogate must count the ratio once, got {name!r}, whose gradient grows "
            f"with its square: pi/mu counts twice; terms.log_ratios_N has the correction in it "
            f"already: multiply by no further weight"
        )


def _check_alone(
    name: str, together: _Tokens, whole: _Slopes, slopes: Callable[[_Tokens], _Slopes]
) -> None:
    """Check that each episode has the same values alone as beside others."""
    begin = 0
    for length in together.lengths:
        rows = slice(begin, begin + length)
        alone = _Tokens(
            together.log_ratios[rows],
            together.advantages[rows],
            together.log_pi[rows],
            (length,),
        )
        if not all(_equal(a, b[rows]) for a, b in zip(slopes(alone), whole, strict=True)):
            raise _depends_on_others("surrogate", name)
        begin += length


def _terms(tokens: _Tokens, device: torch.device) -> tuple[Terms, Tensor]:
    """Make the arguments of a surrogate, and the log-ratios that it is differentiated by."""
    log_ratios_N, advantages_N, log_pi_N = (
        torch.tensor(column, dtype=torch.float64, device=device) for column in tokens[:3]
    )
    log_anchor_N = log_pi_N - log_ratios_N
    terms = Terms(
        log_ratios_N=log_ratios_N.requires_grad_(),
        advantages_N=advantages_N,
        log_pi_N=log_pi_N,
        log_anchor_N=log_anchor_N.detach(),
        segments=_segments(tokens.lengths, device),
        log_ratio_bound=tokens.log_ratio_bound,
    )
    return terms, log_ratios_N


# --------------------------------------------------------------------------------------------------
# Corrections.


def check_correction(
    correction: Correction,
    name: str,
    settings: AlgorithmSettings,
    *,
    may_ignore_ratio: bool,
    device: torch.device,
) -> None:
    """Check a correction under the settings; arguments as of `check_surrogate`.

    Raises:
        SettingsError: It is wrong; the text says what about it, and what to change.
    """
    checked = _Checked(correction, name, settings, device)

    def corrected(log_rhos: list[float], lengths: tuple[int, ...]) -> tuple[Corrected, Tensor]:
        return _correct(checked, log_rhos, lengths)

    num_tokens = sum(LENGTHS)
    equal, log_rhos_N = corrected([0.0] * num_tokens, LENGTHS)
    if not equal.keep_N.any():
        raise SettingsError(
            f"algorithm.correction must keep tokens on which both policies agree, got {name!r}, "
            f"which leaves them out; nothing would be trained: correct its mask"
        )
    if settings.proximal == "behaviour":  # elsewhere the ratio prox/mu has no gradient
        gradient_N = _gradient("correction", name, equal.log_ratios_N, log_rhos_N)
        _check_gradient_of_log(name, gradient_N)
    _check_growth(name, corrected)
    corrected([], NO_TOKEN)
    moved = _spread(0.5)
    results = [corrected(_spread(width), LENGTHS)[0] for width in (0.5, FAR, 5 * SMALL_STEP)]
    begin = 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        alone, _ = corrected(moved[rows], (length,))
        beside = Corrected(results[0].log_ratios_N[rows], results[0].keep_N[rows])
        if not (alone.keep_N.equal(beside.keep_N) and _equal(*map(_kept, (alone, beside)))):
            raise _depends_on_others("correction", name)
        begin += length
    kept = torch.cat([_kept(result) for result in results])
    if not may_ignore_ratio and len(kept) and _equal(kept, kept[:1].expand_as(kept)):
        raise SettingsError(
            f"algorithm.correction must weigh a token by its ratio, got {name!r}, whose u is the "
            f"same for every ratio; pi/mu would be dropped, and stale episodes trained as if they "
            f"were new: return log_rhos_N, bounded as you like, for the tokens that are kept"
        )


def _correct(
    correction: _Checked, log_rhos: list[float], lengths: tuple[int, ...]
) -> tuple[Corrected, Tensor]:
    """Call a correction; refuse what is no correction of these tokens."""
    name, device = correction.name, correction.device
    log_rhos_N = torch.tensor(log_rhos, dtype=torch.float64, device=device).requires_grad_()
    shape = tuple(log_rhos_N.shape)
    try:
        result: Any = correction.function(
            log_rhos_N, _segments(lengths, device), correction.settings
        )
    except Exception as error:
        raise SettingsError(
            f"algorithm.correction must take a microbatch of {shape[0]} tokens, got {name!r}, "
            f"which raises {explain(error)}; mend it"
        ) from error
    if not isinstance(result, Corrected):
        raise SettingsError(
            f"algorithm.correction must return a Corrected of learner.algorithm.corrections, got "
            f"{name!r}, which returns {type(result).__name__}; return "
            f"Corrected(log_ratios_N, keep_N)"
        )
    shapes = [_shape_of(part) for part in (result.log_ratios_N, result.keep_N)]
    if shapes != [shape, shape] or result.keep_N.dtype != torch.bool:
        raise SettingsError(
            f"algorithm.correction must return a log-ratio and a boolean for each token, shape "
            f"{shape}, got {name!r}, which returns {shapes[0]} and {shapes[1]}; give every token "
            f"its own, also where an episode shares one ratio"
        )
    kept_K = _kept(result)
    if not kept_K.isfinite().all():
        worst = kept_K[~kept_K.isfinite()][0].item()
        raise SettingsError(
            f"algorithm.correction must be finite, got {name!r}, whose log(u) is {worst:g} at a "
            f"token that it keeps, with log-ratios up to {max(map(abs, log_rhos)):g}; stay in log "
            f"space: clamp log_rhos_N instead of taking the logarithm of a ratio"
        )
    return result, log_rhos_N


def _check_gradient_of_log(name: str, gradient_N: Tensor) -> None:
    """Check the gradient of log(u) at rho = 1, summed over each episode."""
    if not gradient_N.any():
        raise SettingsError(
            f"algorithm.correction must have a gradient, got {name!r}, whose log(u) is detached "
            f"from log_rhos_N; nothing would be learned: return values + log_rhos_N - "
            f"log_rhos_N.detach()"
        )
    if (gradient_N < 0).any():
        raise _turned_correction(name)
    if (gradient_N > 1.5).any():
        raise SettingsError(
            f"algorithm.correction must give log(u) the gradient of log_rhos_N, got {name!r}, "
            f"which gives it {gradient_N.max().item():.3g} times as much: pi/mu counts more than "
            f"once; return values.detach() + log_rhos_N - log_rhos_N.detach()"
        )


def _check_growth(
    name: str, corrected: Callable[[list[float], tuple[int, ...]], tuple[Corrected, Tensor]]
) -> None:
    """Check how u grows with rho near 1, for episodes of one token."""
    result, _ = corrected([-SMALL_STEP, 0.0, SMALL_STEP], (1, 1, 1))
    if not result.keep_N.all():
        return
    powers = (result.log_ratios_N.diff() / SMALL_STEP).tolist()
    if min(powers) < -0.5:
        raise _turned_correction(name)
    if max(powers) > 1.5:
        raise SettingsError(
            f"algorithm.correction must count the ratio once, got {name!r}, whose u grows with "
            f"the power {max(powers):.2g} of it: pi/mu counts twice; return log_rhos_N itself, "
            f"bounded as you like"
        )


def _turned_correction(name: str) -> SettingsError:
    return SettingsError(
        f"algorithm.correction must grow with pi/mu, got {name!r}, whose sign is turned: it weighs "
        f"by mu/pi; log_rhos_N is log(pi) - log(mu) already"
    )


def _kept(result: Corrected) -> Tensor:
    return result.log_ratios_N.detach()[result.keep_N]


# --------------------------------------------------------------------------------------------------
# Advantages.


def check_advantage(
    advantage: Callable[[BatchRewards, AlgorithmSettings], Float64],
    name: str,
    settings: AlgorithmSettings,
) -> None:
    """Check an advantage under the settings.

    Raises:
        SettingsError: It is wrong; the text says what about it, and what to change.
    """
    outcomes = _made_up_rewards(settings.pass_k + 2)
    advantages_E = _advantages(advantage, name, outcomes, settings)
    above_E = outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)
    gain = float(above_E @ advantages_E)
    if abs(gain) <= TOLERANCE * np.linalg.norm(above_E) * np.linalg.norm(advantages_E):
        raise SettingsError(
            f"algorithm.advantage must depend on the rewards, got {name!r}, whose values are the "
            f"same for good and bad episodes of a prompt; nothing would be learned: compute them "
            f"from outcomes.rewards_E"
        )
    if gain < 0:
        raise SettingsError(
            f"algorithm.advantage must rise with the reward, got {name!r}, whose sign is turned: "
            f"it is lower for the better episodes of a prompt; return rewards less their baseline"
        )
    lengths_E = np.arange(len(outcomes.rewards_E)) % 4  # some episodes without a trained token
    uneven = BatchRewards(outcomes.rewards_E, lengths_E.astype(np.float64), outcomes.groups_E)
    _advantages(advantage, name, uneven, settings)


def _made_up_rewards(size: int) -> BatchRewards:
    """Make groups of equal and of different rewards from 0 to 1, one of a single member.

    Members of a group are not neighbours. A negative reward would be outside the domain of some
    advantages, such as those that divide by the mean.
    """
    one_right = [1.0] + [0.0] * (size - 1)
    parts = [n * 5 % size / size for n in range(size)]
    groups = (one_right, [0.0] * size, [1.0] * size, parts, [0.5])
    places = sorted((place, n) for n, rewards in enumerate(groups) for place in range(len(rewards)))
    return BatchRewards(
        rewards_E=np.array([groups[n][place] for place, n in places]),
        lengths_E=np.full(len(places), 7.0),
        groups_E=np.array([n for _, n in places]),
    )


def _advantages(
    advantage: Callable[[BatchRewards, AlgorithmSettings], Float64],
    name: str,
    outcomes: BatchRewards,
    settings: AlgorithmSettings,
) -> Float64:
    """Call an advantage; refuse what is none of these episodes."""
    before = [outcomes.rewards_E.copy(), outcomes.lengths_E.copy(), outcomes.groups_E.copy()]
    shape = outcomes.rewards_E.shape
    try:
        with np.errstate(all="ignore"):
            values: Any = [advantage(outcomes, settings) for _ in range(2)]
    except Exception as error:
        raise SettingsError(
            f"algorithm.advantage must take a batch of {shape[0]} episodes in groups of several "
            f"sizes, got {name!r}, which raises {explain(error)}; mend it"
        ) from error
    advantages_E = values[0]
    if not isinstance(advantages_E, np.ndarray) or advantages_E.shape != shape:
        raise SettingsError(
            f"algorithm.advantage must return a numpy array with one value for each episode, shape "
            f"{shape}, got {name!r}, which returns {type(advantages_E).__name__} of "
            f"{_shape_of(advantages_E)}; return outcomes.rewards_E less a baseline"
        )
    if not np.isfinite(advantages_E).all():
        raise SettingsError(
            f"algorithm.advantage must be finite, got {name!r}, which is not for "
            f"{int((~np.isfinite(advantages_E)).sum())} of {shape[0]} episodes; groups whose "
            f"rewards are all equal, all 0, or of a single episode occur: add STD_FLOOR to what "
            f"divides, or take 0 there"
        )
    after = [outcomes.rewards_E, outcomes.lengths_E, outcomes.groups_E]
    if not all(map(np.array_equal, before, after)) or not np.array_equal(*values):
        raise SettingsError(
            f"algorithm.advantage must be a pure function, got {name!r}, which changes its "
            f"arguments or returns other values when it is called again; a batch that is replayed "
            f"after a crash would differ: copy before changing, and draw no random numbers"
        )
    return np.asarray(advantages_E, dtype=np.float64)


# --------------------------------------------------------------------------------------------------
# Made-up tokens.


def _by_token(values: tuple[float, ...]) -> list[float]:
    """Give each token its episode's value."""
    return [v for v, length in zip(values, LENGTHS, strict=True) for _ in range(length)]


def _spread(width: float) -> list[float]:
    """Make log-ratios from -width to width, in an order that mixes them."""
    number = sum(LENGTHS)
    return [width * (2 * (n * 4 % number) / (number - 1) - 1) for n in range(number)]


def _log_pi() -> list[float]:
    """Make log-probs low enough for every anchor that `_spread(0.5)` leads to."""
    return [-0.6 - 0.1 * n for n in range(sum(LENGTHS))]


def _segments(lengths: tuple[int, ...], device: torch.device) -> Segments:
    episodes_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Segments(episodes_N.to(device), len(lengths))


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor or an array; None for anything else."""
    return tuple(value.shape) if hasattr(value, "shape") else None


def _shapes_of(values: Any) -> list[tuple[int, ...] | None]:
    return [_shape_of(value) for value in values] if isinstance(values, tuple) else []


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(
        left.double(), right.double(), rtol=TOLERANCE, atol=TOLERANCE**2
    )


def _depends_on_others(kind: str, name: str) -> SettingsError:
    return SettingsError(
        f"algorithm.{kind} must treat each episode alone, got {name!r}, whose values for an "
        f"episode change with the other episodes of a microbatch; which these are depends on "
        f"learner.microbatch_tokens and on the number of ranks: use terms.segments for sums over "
        f"an episode, and algorithm.aggregation for averages over a batch"
    )
