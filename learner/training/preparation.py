"""Preparation of a batch: proximal, reference and teacher log-probs, values, token advantages.

Owns the passes without a gradient before the first optimizer step. A batch is one policy version,
whatever the number of its optimizer steps: all of them are measured from the proximal policy and
the values of the batch's beginning. Only what the settings need is computed.

Shapes: N scored tokens of a microbatch (flat).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from configs.validation.algorithm import WITH_BEHAVIOUR
from learner.algorithm.advantages import STD_FLOOR
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch, TeacherInput, by_place
from learner.algorithm.reference_kl import kl_rewards, rewards_to_go
from learner.algorithm.token_advantages import teacher_advantages, token_advantages
from learner.model.lora import without_adapters
from learner.model.policy import Policy, TokenScores, release
from learner.model.ranks import Ranks

from .critic import Critic


def prepare(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    *,
    settings: AlgorithmSettings,
    ranks: Ranks,
    reference: Policy | None = None,
    teachers: Sequence[Policy] = (),
    critic: Critic | None = None,
    critic_microbatches: Sequence[Microbatch] = (),
) -> list[PreparedMicrobatch]:
    """Compute the constants of a batch's optimizer steps; every rank must call it.

    Args:
        policy: The policy at the beginning of the batch.
        microbatches: This rank's share; all ranks have the same number.
        settings: Settings that decide what is computed.
        ranks: All ranks; they give the device.
        reference: Reference policy of the KL penalty, if there is one; its adapters do not count.
        teachers: Those of `algorithm.teachers` that are in the learner; nor do theirs.
        critic: Values the states for token advantages, if there is one.
        critic_microbatches: The same tokens in the packing of a critic that has a token budget of
            its own.
    """
    values = None
    if critic is not None and critic_microbatches:
        values = evaluate_all(critic, critic_microbatches, ranks.device)
    has_kl_reward = reference is not None and settings.kl_in == "reward"
    is_scored = (
        has_kl_reward
        or critic is not None
        or settings.proximal == "recomputed"
        or settings.has_teacher
    )
    prepared = []
    for microbatch in microbatches:
        on_device = microbatch.to(ranks.device)
        scores = score(policy, on_device) if is_scored else None
        log_ref_N = None
        if reference is not None:
            with without_adapters(reference):
                log_ref_N = score(reference, on_device).logprobs_N
        log_prox_N = None if scores is None else scores.logprobs_N
        constants = PreparedMicrobatch(on_device, log_prox_N=log_prox_N, log_ref_N=log_ref_N)
        if scores is not None and (has_kl_reward or critic is not None):
            values_N = None if values is None else values[on_device.places_N]
            constants = _with_token_advantages(
                constants, scores, critic, settings, values_N, has_kl_reward=has_kl_reward
            )
        prepared.append(constants)
    if (critic is not None and settings.whiten == "batch") or (
        critic is None and has_kl_reward and settings.whiten != "none"
    ):
        whitened = whiten([constants.microbatch.advantages_N for constants in prepared], ranks)
        prepared = [
            _with_advantages(constants, advantages_N)
            for constants, advantages_N in zip(prepared, whitened, strict=True)
        ]
    return _with_teachers(prepared, teachers, settings, critic)


def _with_advantages(prepared: PreparedMicrobatch, advantages_N: Tensor) -> PreparedMicrobatch:
    return replace(prepared, microbatch=replace(prepared.microbatch, advantages_N=advantages_N))


@torch.no_grad()
def score(policy: Policy, microbatch: Microbatch) -> TokenScores:
    """Score a microbatch's tokens without a gradient; every rank must call it."""
    scores: TokenScores = policy(microbatch.sequences, microbatch.indices_N)
    release(policy)
    return scores


def _with_token_advantages(
    prepared: PreparedMicrobatch,
    scores: TokenScores,
    critic: Critic | None,
    settings: AlgorithmSettings,
    values_N: Tensor | None,
    *,
    has_kl_reward: bool,
) -> PreparedMicrobatch:
    """Turn the rewards of a microbatch into advantages that differ from token to token."""
    microbatch, rewards_N = prepared.microbatch, None
    if has_kl_reward:
        assert prepared.log_ref_N is not None
        rewards_N = kl_rewards(scores.logprobs_N, prepared.log_ref_N, settings)
    if critic is None:
        assert rewards_N is not None
        advantages_N = rewards_to_go(microbatch, rewards_N)
        return replace(prepared, microbatch=replace(microbatch, advantages_N=advantages_N))
    if values_N is None:
        values_N = critic.evaluate(microbatch, scores.states_MD)
    assigned = token_advantages(
        microbatch,
        scores.logprobs_N - microbatch.behaviour_logprobs_N,
        values_N,
        name=settings.advantage,
        settings=critic.settings,
        rewards_N=rewards_N,
    )
    return replace(
        prepared,
        microbatch=replace(microbatch, advantages_N=assigned.advantages_N),
        values_N=values_N,
        targets_N=assigned.targets_N,
    )


def _with_teachers(
    prepared: Sequence[PreparedMicrobatch],
    teachers: Sequence[Policy],
    settings: AlgorithmSettings,
    critic: Critic | None,
) -> list[PreparedMicrobatch]:
    """Add the teachers' advantages to those of the reward, which are whitened already.

    Each teacher scores all its episodes before the next one does.
    """
    if not settings.has_teacher:
        return list(prepared)
    scored = [
        constants.microbatch.behaviour_logprobs_N.new_full(
            constants.microbatch.advantages_N.shape, math.nan
        )
        if constants.microbatch.log_teacher_N is None
        else constants.microbatch.log_teacher_N
        for constants in prepared
    ]
    for number, teacher in enumerate(teachers):
        with without_adapters(teacher):
            for constants, log_teacher_N in zip(prepared, scored, strict=True):
                _score_as_teacher(
                    teacher, constants.microbatch.teacher_inputs[number], log_teacher_N
                )
    return [
        _with_teacher(constants, log_teacher_N, settings, critic)
        for constants, log_teacher_N in zip(prepared, scored, strict=True)
    ]


@torch.no_grad()
def _score_as_teacher(teacher: Policy, seen: TeacherInput, log_teacher_N: Tensor) -> None:
    """Write a teacher's log-probs to their places; every rank must call it."""
    device = log_teacher_N.device
    scores: TokenScores = teacher(seen.sequences.to(device), seen.indices_M.to(device))
    log_teacher_N[seen.places_M.to(device)] = scores.logprobs_N
    release(teacher)


def _with_teacher(
    prepared: PreparedMicrobatch,
    log_teacher_N: Tensor,
    settings: AlgorithmSettings,
    critic: Critic | None,
) -> PreparedMicrobatch:
    microbatch, log_pi_N = prepared.microbatch, prepared.log_prox_N
    assert log_pi_N is not None
    taught_N = teacher_advantages(log_pi_N, log_teacher_N, settings.teacher_weight)
    if settings.advantage in WITH_BEHAVIOUR:  # no correction weighs prox/mu there
        assert critic is not None
        log_rhos_N = log_pi_N - microbatch.behaviour_logprobs_N
        taught_N = log_rhos_N.exp().clamp(max=critic.settings.rho_bar) * taught_N
    return replace(
        _with_advantages(prepared, microbatch.advantages_N + taught_N), log_teacher_N=log_teacher_N
    )


# --------------------------------------------------------------------------------------------------
# A critic with a token budget of its own: the same tokens of a rank in another packing.


def evaluate_all(
    critic: Critic, microbatches: Iterable[Microbatch], device: torch.device
) -> Tensor:
    """Value the states of a rank's whole batch, each at its place; every rank must call it."""
    on_device = [microbatch.to(device) for microbatch in microbatches]
    return by_place(on_device, [critic.evaluate(microbatch) for microbatch in on_device])


def prepare_critic(
    prepared: Sequence[PreparedMicrobatch], critic_microbatches: Sequence[Microbatch]
) -> list[PreparedMicrobatch]:
    """Give the critic's microbatches the values and targets of those of the policy.

    Without microbatches of its own it has the policy's.
    """
    if not critic_microbatches:
        return list(prepared)
    microbatches = [constants.microbatch for constants in prepared]
    values, targets = (
        by_place(microbatches, [cast("Tensor", constant) for constant in constants])
        for constants in zip(*((c.values_N, c.targets_N) for c in prepared), strict=True)
    )
    on_device = [microbatch.to(values.device) for microbatch in critic_microbatches]
    return [
        PreparedMicrobatch(
            microbatch,
            values_N=values[microbatch.places_N],
            targets_N=targets[microbatch.places_N],
        )
        for microbatch in on_device
    ]


# --------------------------------------------------------------------------------------------------
# Whitening of a batch's advantages.


def whiten(advantages: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Bring the advantages of all microbatches and ranks to mean 0 and standard deviation 1.

    Every rank must call it.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    for advantages_N in advantages:
        wide_N = advantages_N.double()
        sums += torch.stack([torch.ones_like(wide_N).sum(), wide_N.sum(), wide_N.square().sum()])
    num, total, squares = ranks.sum(sums).tolist()
    mean = total / max(1.0, num)
    std = math.sqrt(max(0.0, squares / max(1.0, num) - mean**2))
    return [(advantages_N - mean) / (std + STD_FLOOR) for advantages_N in advantages]


# --------------------------------------------------------------------------------------------------
# M2PO's bound on |log(pi/mu)| for the tokens of one optimizer step.
#
# Computed before each optimizer step, over the tokens of its minibatch on all ranks and under the
# present policy: a bound from the batch's beginning would miss the effect of the steps before. It
# costs a forward pass.
#
# Source:
#     Zheng et al. 2025, arXiv:2510.01161.

# Halvings of the interval: beyond that float64 has no more digits.
HALVINGS = 64


def bound_ratios(
    policy: Policy, minibatch: Sequence[PreparedMicrobatch], most: float, ranks: Ranks
) -> list[PreparedMicrobatch]:
    """Bound the ratios of the next optimizer step; every rank must call it.

    Args:
        policy: The present one.
        minibatch: This rank's share of the step's tokens.
        most: Largest mean of log(rho)^2, nats^2.
        ranks: All ranks.
    """
    moves = [
        (
            score(policy, constants.microbatch).logprobs_N
            - constants.microbatch.behaviour_logprobs_N,
            constants.microbatch.advantages_N,
        )
        for constants in minibatch
    ]
    bound = second_moment_bound(moves, most, ranks)
    return [replace(constants, log_ratio_bound=bound) for constants in minibatch]


def second_moment_bound(moves: Sequence[tuple[Tensor, Tensor]], most: float, ranks: Ranks) -> float:
    """Find the largest bound under which the remaining second moment is at most `most`.

    Only tokens that move out in their advantage's direction (A log(rho) > 0) are counted and
    masked. Leaving out the farthest of them lowers the mean of log(rho)^2 of the rest, so the mean
    ascends with the bound, and halving finds it without gathering the batch on one rank.

    Args:
        moves: log(pi/mu), nats, and advantages of each microbatch's tokens. Shapes [N].
        most: Largest mean of log(rho)^2, nats^2.
        ranks: All ranks; each of them calls this.

    Returns:
        Largest |log(rho)| that stays, nats; infinite if all may.
    """
    outward = [x_N[x_N * advantages_N > 0].double().abs() for x_N, advantages_N in moves]
    # The zero changes no compared mean, and gives an empty batch a maximum.
    distances_M = torch.cat([torch.zeros(1, dtype=torch.float64, device=ranks.device), *outward])
    widest = float(ranks.maximum(distances_M.max()))

    def mean_within(bound: float) -> float:
        inside_M = distances_M[1:][distances_M[1:] <= bound]
        counted = torch.stack([inside_M.square().sum(), inside_M.new_tensor(len(inside_M))])
        total, num = ranks.sum(counted).tolist()
        return float(total / num) if num else 0.0

    if mean_within(widest) <= most:
        return math.inf
    low, high = 0.0, widest
    for _halving in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_within(middle) <= most else (low, middle)
    return low
