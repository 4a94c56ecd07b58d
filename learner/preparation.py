"""What is known of a batch's tokens before its first optimizer step, and stays so for all of them.

Owns the passes without a gradient. A batch is one policy version, whatever the number of optimizer
steps in it: what the steps are measured from (the proximal policy, the values) is that of the
batch's beginning. Nothing is computed that no setting asks for.

Shapes: N scored tokens of a microbatch (flat).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from configs.settings import AlgorithmSettings

from .batch import Microbatch
from .model import Policy
from .ranks import Ranks
from .second_moment import second_moment_bound


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A microbatch on the learner's device, with what was computed for its tokens."""

    microbatch: Microbatch
    log_prox_N: Tensor | None = None
    """Log-probs under the policy at the beginning of the batch, nats. Shape [N]."""
    log_ref_N: Tensor | None = None
    """Log-probs under the frozen reference policy, nats. Shape [N]."""
    values_N: Tensor | None = None
    """The critic's values. Shape [N]."""
    log_ratio_bound: float = math.inf
    """M2PO: largest |log(pi/mu)| that stays in this batch, nats."""


def prepare(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    *,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> list[Prepared]:
    """Compute what the optimizer steps of a batch need; every rank must call it.

    Args:
        policy: As it is at the beginning of the batch.
        microbatches: This rank's share; all ranks have the same number.
        settings: Say what is needed.
        ranks: Whose device is used.
    """
    prepared = []
    for microbatch in microbatches:
        own = microbatch.to(ranks.device)
        needs_prox = settings.proximal == "recomputed" or settings.surrogate == "m2po"
        prepared.append(Prepared(own, log_prox_N=score(policy, own) if needs_prox else None))
    return _bound(prepared, settings, ranks) if settings.surrogate == "m2po" else prepared


def _bound(
    prepared: Sequence[Prepared], settings: AlgorithmSettings, ranks: Ranks
) -> list[Prepared]:
    """Bound the ratios of the batch; there are no ratios and advantages left to change."""
    moves = [
        (each.log_prox_N - each.microbatch.behaviour_logprobs_N, each.microbatch.advantages_N)
        for each in prepared
        if each.log_prox_N is not None
    ]
    bound = second_moment_bound(moves, settings.second_moment, ranks)
    return [replace(each, log_ratio_bound=bound) for each in prepared]


@torch.no_grad()
def score(policy: Policy, microbatch: Microbatch) -> Tensor:
    """Log-probs of a microbatch's tokens under a frozen policy; every rank must call it."""
    logprobs_N: Tensor = policy(microbatch.token_ids_BT, microbatch.positions_N).logprobs_N
    if isinstance(policy, FSDPModule):
        # Without a backward pass the root would stay gathered, and the next step would change its
        # shards only.
        policy.reshard()
    return logprobs_N
