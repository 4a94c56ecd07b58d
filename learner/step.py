"""One optimizer step: forward, loss and backward over the microbatches of a batch, then AdamW.

Owns the arithmetic of a step on all ranks. Knows nothing of the store, of files or of other
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.settings import AlgorithmSettings

from .batch import Microbatch, empty_microbatch
from .diagnostics import Divergence, DivergenceMeter
from .losses import policy_loss
from .model import Policy
from .optimizer import AdamWithSchedule, StepOutcome
from .ranks import Ranks


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What training one batch showed, merged over ranks."""

    loss: float
    outcome: StepOutcome
    divergence: Divergence


def train_batch(
    policy: Policy,
    optimizer: AdamWithSchedule,
    step: int,
    microbatches: Sequence[Microbatch],
    *,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> TrainedBatch:
    """Train batch `step` on this rank's microbatches; every rank must call it."""
    most = int(ranks.maximum(torch.tensor([len(microbatches)])))
    padding = [empty_microbatch()] * (most - len(microbatches))
    meter = DivergenceMeter(settings, ranks.device)
    total_loss = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    for microbatch in [*microbatches, *padding]:
        total_loss += accumulate(policy, microbatch.to(ranks.device), meter, settings)
    outcome = optimizer.step(step)
    return TrainedBatch(
        loss=float(ranks.sum(total_loss)), outcome=outcome, divergence=meter.merge(ranks)
    )


def accumulate(
    policy: Policy, microbatch: Microbatch, meter: DivergenceMeter, settings: AlgorithmSettings
) -> torch.Tensor:
    """Add one microbatch's gradient to the parameters' and return its share of the loss."""
    scores = policy(
        microbatch.token_ids_BT,
        microbatch.positions_N,
        entropy_gradient=settings.entropy_bonus > 0,
    )
    log_rhos_N = scores.logprobs_N - microbatch.behaviour_logprobs_N
    loss = policy_loss(
        log_rhos_N,
        microbatch.advantages_N,
        microbatch.weights_N,
        scores.entropies_N,
        settings,
    )
    loss.backward()
    meter.add(log_rhos_N, scores.entropies_N, microbatch)
    return loss.detach()
