"""What is known of a batch's tokens before its first optimizer step, and stays so for all of them.

Owns the passes without a gradient. A batch is one policy version, whatever the number of optimizer
steps in it: what the steps are measured from (the proximal policy, the values) is that of the
batch's beginning. Nothing is computed that no setting asks for.

Shapes: N scored tokens of a microbatch (flat).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from configs.settings import AlgorithmSettings

from .batch import Microbatch
from .model import Policy
from .ranks import Ranks


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
        needs_prox = settings.proximal == "recomputed"
        prepared.append(Prepared(own, log_prox_N=score(policy, own) if needs_prox else None))
    return prepared


@torch.no_grad()
def score(policy: Policy, microbatch: Microbatch) -> Tensor:
    """Log-probs of a microbatch's tokens under a frozen policy; every rank must call it."""
    logprobs_N: Tensor = policy(microbatch.token_ids_BT, microbatch.positions_N).logprobs_N
    if isinstance(policy, FSDPModule):
        # Without a backward pass the root would stay gathered, and the next step would change its
        # shards only.
        policy.reshard()
    return logprobs_N
