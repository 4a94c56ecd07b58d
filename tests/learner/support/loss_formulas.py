"""The loss as its papers write it: plain floats and loops, one episode and one token at a time.

Every formula is a function of two policies, the one that moves and the one at which everything
under a stop-gradient is held; equal in value, and the derivative by the first is the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.settings import AlgorithmSettings

Floats = list[float]


@dataclass(frozen=True)
class Tokens:
    """One episode."""

    log_mu: Floats
    log_prox: Floats
    log_pi: Floats
    lags: list[int]
    advantages: Floats
    weight: float


@dataclass(frozen=True)
class _Bounds:
    settings: AlgorithmSettings
    log_ratio: float
    """M2PO's, nats."""


def loss(
    moving: list[Floats], episodes: list[Tokens], settings: AlgorithmSettings, bound: float
) -> float:
    """Loss of the batch; `moving` has log pi of each episode, as does `Tokens.log_pi`, held."""
    total = 0.0
    for log_pi, episode in zip(moving, episodes, strict=True):
        values = episode_objective(log_pi, episode, settings, bound)
        total -= episode.weight * sum(values)
    return total


def episode_objective(
    log_pi: Floats, held: Tokens, settings: AlgorithmSettings, bound: float
) -> Floats:
    """keep u S of each token."""
    steps = range(len(log_pi))
    moved = [log_pi[t] - held.log_pi[t] for t in steps]
    anchor = _anchor(held, settings)
    if settings.proximal == "behaviour":
        gaps = [held.log_pi[t] - held.log_mu[t] for t in steps]
    else:
        gaps = [anchor[t] - held.log_mu[t] for t in steps]
    ratios, keeps = _corrected(gaps, settings)
    logs = [math.log(ratios[t]) if keeps[t] else 0.0 for t in steps]
    if settings.proximal == "behaviour":
        factors = [1.0] * len(log_pi)
        # A masked token does not move: its ratio counts as 1 in the mean of its episode.
        log_ratios = [logs[t] + (moved[t] if keeps[t] else 0.0) for t in steps]
    else:
        factors = [1.0 if settings.correction == "none" else ratios[t] for t in steps]
        logs = [held.log_pi[t] - anchor[t] for t in steps]
        log_ratios = [logs[t] + moved[t] for t in steps]
    values = _surrogate(log_ratios, logs, held, anchor, _Bounds(settings, bound))
    return [factors[t] * values[t] if keeps[t] else 0.0 for t in steps]


def _anchor(held: Tokens, settings: AlgorithmSettings) -> Floats:
    if settings.proximal == "behaviour":
        return held.log_mu
    if settings.proximal == "recomputed":
        return held.log_prox
    shares = [1 / (lag + 1) for lag in held.lags]
    return [
        share * mu + (1 - share) * pi
        for share, mu, pi in zip(shares, held.log_mu, held.log_pi, strict=True)
    ]


def _corrected(gaps: Floats, settings: AlgorithmSettings) -> tuple[Floats, list[bool]]:
    rhos = [math.exp(gap) for gap in gaps]
    everything = [True] * len(rhos)
    product = math.prod(rhos)
    truncated = [min(rho, settings.rho_bar) for rho in rhos]
    low, high = settings.mask_low, settings.mask_high
    match settings.correction:
        case "none":
            return rhos, everything
        case "tis":
            return truncated, everything
        case "seq_tis":
            return [min(product, settings.rho_bar)] * len(rhos), everything
        case "geo_tis":
            mean = product ** (1 / len(rhos))
            return [min(mean, settings.rho_bar)] * len(rhos), everything
        case "mis" | "icepop":
            return rhos, [low <= rho <= high for rho in rhos]
        case "seq_mis":
            return [product] * len(rhos), [low <= product <= high] * len(rhos)
        case "geo_mask":
            mean = product ** (1 / len(rhos))
            return truncated, [settings.geo_low <= mean <= settings.geo_high] * len(rhos)
        case "token_veto":
            return truncated, [min(rhos) >= settings.veto] * len(rhos)
        case other:
            raise ValueError(f"no formula is written for the correction {other}")


def _surrogate(
    log_ratios: Floats, held_logs: Floats, held: Tokens, anchor: Floats, bound: _Bounds
) -> Floats:
    """S of each token: its ratio moves, what is under a stop-gradient is held."""
    settings = bound.settings
    if settings.surrogate == "gmpo":
        clipped = [
            _clip_log(x, a, settings) for x, a in zip(held_logs, held.advantages, strict=True)
        ]
        now = [_clip_log(x, a, settings) for x, a in zip(log_ratios, held.advantages, strict=True)]
        mean = sum(clipped) / len(clipped)
        return [math.exp(mean + now[t] - clipped[t]) * held.advantages[t] for t in range(len(now))]
    if settings.surrogate in ("m2po", "dppo_tv", "dppo_kl"):
        return [
            0.0
            if held.advantages[t] * held_logs[t] > 0 and _is_far(t, held_logs, held, anchor, bound)
            else math.exp(log_ratios[t]) * held.advantages[t]
            for t in range(len(log_ratios))
        ]
    return [
        _token(log_ratios[t], t, held_logs, held.advantages[t], settings)
        for t in range(len(log_ratios))
    ]


def _token(
    log_ratio: float, t: int, held_logs: Floats, advantage: float, settings: AlgorithmSettings
) -> float:
    ratio, held_ratio = math.exp(log_ratio), math.exp(held_logs[t])
    moved, mean = log_ratio - held_logs[t], sum(held_logs) / len(held_logs)
    match settings.surrogate:
        case "reinforce":
            return ratio * advantage
        case "clip":
            return _clip(ratio, advantage, settings)
        case "gspo":
            return _clip(math.exp(mean + moved), advantage, settings)
        case "cispo":
            weight = min(max(held_ratio, 1 - settings.clip_low), 1 + settings.clip_high)
            return weight * advantage * math.exp(moved)
        case "topr":
            weight = 1.0 if advantage >= 0 else min(math.exp(sum(held_logs)), 1.0)
            return weight * advantage * math.exp(moved)
        case _:
            raise AssertionError(settings.surrogate)


def _is_far(t: int, held_logs: Floats, held: Tokens, anchor: Floats, bound: _Bounds) -> bool:
    settings = bound.settings
    if settings.surrogate == "m2po":
        return abs(held_logs[t]) > bound.log_ratio
    pi, mu = math.exp(held.log_pi[t]), math.exp(anchor[t])
    distance = abs(pi - mu)
    if settings.surrogate == "dppo_kl":
        distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return distance > (settings.clip_high if held.advantages[t] > 0 else settings.clip_low)


def _clip(ratio: float, advantage: float, settings: AlgorithmSettings) -> float:
    clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
    value = min(ratio * advantage, clipped * advantage)
    if settings.dual_clip is not None and advantage < 0:
        return max(value, settings.dual_clip * advantage)
    return value


def _clip_log(log_ratio: float, advantage: float, settings: AlgorithmSettings) -> float:
    if advantage > 0:
        return min(log_ratio, settings.clip_high)
    return max(log_ratio, -settings.clip_low) if advantage < 0 else log_ratio


def slopes(
    episodes: list[Tokens], settings: AlgorithmSettings, bound: float, step: float = 1e-6
) -> Floats:
    """Derivative of the loss by every log pi, by central differences."""
    found = []
    for number, episode in enumerate(episodes):
        for t in range(len(episode.log_pi)):
            either = []
            for sign in (1, -1):
                moving = [list(other.log_pi) for other in episodes]
                moving[number][t] += sign * step
                either.append(loss(moving, episodes, settings, bound))
            found.append((either[0] - either[1]) / (2 * step))
    return found
