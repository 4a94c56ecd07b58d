"""The optimizer steps of one batch: preparation, then forward, loss and backward, then AdamW.

    prepare                       once: what the whole batch is measured from, without a gradient
    for each epoch                `algorithm.num_epochs`
        for each minibatch        `algorithm.num_minibatches`: a share of the batch's groups
            for each microbatch   what fits into one forward pass
                accumulate
            optimizer step

However many optimizer steps, the batch is one policy version, with one learning rate. A rank that
has fewer microbatches than another pads with empty ones, so that all take part in every collective.

Owns the arithmetic of a batch on all ranks. Knows nothing of the store, of files or of other
batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.settings import AlgorithmSettings

from .batch import Microbatch, empty_microbatch
from .critic import Critic, CriticFigures
from .diagnostics import Divergence, DivergenceMeter
from .losses import policy_loss
from .model import Policy
from .optimizer import AdamWithSchedule, StepOutcome
from .preparation import Prepared, prepare
from .ranks import Ranks


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What the optimizer steps of one batch did."""

    grad_norm: float
    """Largest of the steps', before clipping; not finite where one was skipped."""
    learning_rate: float
    optimizer_steps: int
    """Skipped ones included."""
    skipped_steps: int
    """Steps left out because the gradient was not finite."""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What training one batch showed, merged over ranks."""

    loss: float
    """Mean over the optimizer steps."""
    outcome: BatchOutcome
    divergence: Divergence
    critic: CriticFigures | None = None


def train_batch(
    policy: Policy,
    optimizer: AdamWithSchedule,
    step: int,
    microbatches: Sequence[Microbatch],
    *,
    settings: AlgorithmSettings,
    ranks: Ranks,
    critic: Critic | None = None,
) -> TrainedBatch:
    """Train batch `step` on this rank's microbatches; every rank must call it."""
    padded = pad(microbatches, settings.num_minibatches, ranks)
    prepared = prepare(policy, padded, settings=settings, ranks=ranks, critic=critic)
    meter = DivergenceMeter(settings, ranks.device)
    total_loss = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    steps: list[StepOutcome] = []
    for _epoch in range(settings.num_epochs):
        for minibatch in range(settings.num_minibatches):
            for each in prepared:
                if each.microbatch.minibatch == minibatch:
                    total_loss += accumulate(policy, each, meter, settings, critic)
            if critic is not None:
                critic.step(step)
            is_held = critic is not None and critic.is_warming_up(step)
            steps.append(optimizer.hold(step) if is_held else optimizer.step(step))
    return TrainedBatch(
        loss=float(ranks.sum(total_loss)) / len(steps),
        outcome=merge(steps),
        divergence=meter.merge(ranks),
        critic=None if critic is None else critic.figures(ranks),
    )


def pad(microbatches: Sequence[Microbatch], num_minibatches: int, ranks: Ranks) -> list[Microbatch]:
    """Add empty microbatches until every rank has as many in each minibatch as any other."""
    minibatches = [microbatch.minibatch for microbatch in microbatches]
    counts = torch.tensor([minibatches.count(number) for number in range(num_minibatches)])
    lacking = (ranks.maximum(counts) - counts).tolist()
    empty = [empty_microbatch(number) for number, lack in enumerate(lacking) for _ in range(lack)]
    return [*microbatches, *empty]


def merge(steps: Sequence[StepOutcome]) -> BatchOutcome:
    """Say in one line what several optimizer steps did."""
    norms = [step.grad_norm for step in steps]
    return BatchOutcome(
        grad_norm=max(norms) if all(map(math.isfinite, norms)) else math.nan,
        learning_rate=steps[-1].learning_rate,
        optimizer_steps=len(steps),
        skipped_steps=sum(step.skipped for step in steps),
    )


def accumulate(
    policy: Policy,
    prepared: Prepared,
    meter: DivergenceMeter,
    settings: AlgorithmSettings,
    critic: Critic | None = None,
) -> torch.Tensor:
    """Add one microbatch's gradient to the parameters' and return its share of the policy loss."""
    microbatch = prepared.microbatch
    scores = policy(
        microbatch.token_ids_BT,
        microbatch.positions_N,
        entropy_gradient=settings.entropy_bonus > 0,
    )
    found = policy_loss(scores.logprobs_N, scores.entropies_N, prepared, settings)
    total = found.loss
    if critic is not None:
        assert prepared.values_N is not None and prepared.targets_N is not None
        total = total + critic.loss(
            microbatch, scores.states_ND, prepared.values_N, prepared.targets_N
        )
    total.backward()
    log_rhos_N = scores.logprobs_N - microbatch.behaviour_logprobs_N
    meter.add(log_rhos_N, scores.entropies_N, microbatch)
    return found.loss.detach()
