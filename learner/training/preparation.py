"""Preparation of a batch: proximal and reference log-probs, values, token advantages.

Owns the passes without a gradient before the first optimizer step. A batch is one policy version,
whatever the number of its optimizer steps: all of them are measured from the proximal policy and
the values of the batch's beginning. Only what the settings need is computed.

Shapes: N scored tokens of a microbatch (flat).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.group_statistics import STD_FLOOR
from learner.algorithm.microbatch import Microbatch, Prepared
from learner.algorithm.reference_kl import kl_rewards, rewards_to_go
from learner.algorithm.token_advantages import token_advantages
from learner.model.policy import Policy, Scores, release
from learner.model.ranks import Ranks

from .critic import Critic


def prepare(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    *,
    settings: AlgorithmSettings,
    ranks: Ranks,
    reference: Policy | None = None,
    critic: Critic | None = None,
) -> list[Prepared]:
    """Compute the constants of a batch's optimizer steps; every rank must call it.

    Args:
        policy: The policy at the beginning of the batch.
        microbatches: This rank's share; all ranks have the same number.
        settings: Decide what is computed.
        ranks: All of them; give the device.
        reference: The frozen policy of the KL penalty, if there is one.
        critic: Values the states for token advantages, if there is one.
    """
    pays_in_reward = reference is not None and settings.kl_in == "reward"
    is_scored = pays_in_reward or critic is not None or settings.proximal == "recomputed"
    prepared = []
    for microbatch in microbatches:
        own = microbatch.to(ranks.device)
        scores = score(policy, own) if is_scored else None
        each = Prepared(
            own,
            log_prox_N=None if scores is None else scores.logprobs_N,
            log_ref_N=None if reference is None else score(reference, own).logprobs_N,
        )
        if scores is not None and (pays_in_reward or critic is not None):
            each = _evaluate(each, scores, critic, settings, pays_in_reward=pays_in_reward)
        prepared.append(each)
    if (critic is not None and settings.whiten == "batch") or (
        critic is None and pays_in_reward and settings.whiten != "none"
    ):
        whitened = whiten([each.microbatch.advantages_N for each in prepared], ranks)
        prepared = [
            replace(each, microbatch=replace(each.microbatch, advantages_N=advantages_N))
            for each, advantages_N in zip(prepared, whitened, strict=True)
        ]
    return prepared


@torch.no_grad()
def score(policy: Policy, microbatch: Microbatch) -> Scores:
    """Score a microbatch's tokens without a gradient; every rank must call it."""
    scores: Scores = policy(microbatch.sequences, microbatch.indices_N)
    release(policy)
    return scores


def _evaluate(
    prepared: Prepared,
    scores: Scores,
    critic: Critic | None,
    settings: AlgorithmSettings,
    *,
    pays_in_reward: bool,
) -> Prepared:
    """Turn the rewards of a microbatch into advantages that differ from token to token."""
    microbatch, rewards_N = prepared.microbatch, None
    if pays_in_reward:
        assert prepared.log_ref_N is not None
        rewards_N = kl_rewards(scores.logprobs_N, prepared.log_ref_N, settings)
    if critic is None:
        assert rewards_N is not None
        advantages_N = rewards_to_go(microbatch, rewards_N)
        return replace(prepared, microbatch=replace(microbatch, advantages_N=advantages_N))
    values_N = critic.evaluate(microbatch, scores.states_MD)
    found = token_advantages(
        microbatch,
        scores.logprobs_N - microbatch.behaviour_logprobs_N,
        values_N,
        name=settings.advantage,
        settings=critic.settings,
        rewards_N=rewards_N,
    )
    return replace(
        prepared,
        microbatch=replace(microbatch, advantages_N=found.advantages_N),
        values_N=values_N,
        targets_N=found.targets_N,
    )


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
