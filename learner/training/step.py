"""The optimizer steps of one batch: preparation, then forward, loss and backward, then AdamW.

    prepare                       once: passes without a gradient over the whole batch
    for each epoch                `algorithm.num_epochs`
        for each minibatch        `algorithm.num_minibatches`: a share of the batch's groups
            bound                 for M2PO: from a pass over the minibatch under the present policy
            for each microbatch   one forward and backward pass
                accumulate
            for each microbatch   of a critic with a model of its own: likewise, once the policy's
                accumulate        activations are gone
            optimizer step

Whatever the number of optimizer steps, the batch is one policy version with one learning rate. All
ranks have the same number of microbatches, some of them perhaps empty: all take part in every
collective.

Owns the arithmetic of one batch on all ranks; store, files and other batches lie elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import is_sum_over_tokens, loss_alone, policy_loss
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch
from learner.algorithm.surrogates import WITH_RATIO_BOUND
from learner.model.policy import Policy, has_room, hold_gradients
from learner.model.ranks import Ranks
from learner.profiling import phase

from .critic import Critic, CriticFigures
from .divergence import Divergence, DivergenceMeter
from .optimizer import ScheduledOptimizer, StepOutcome
from .preparation import bound_ratios, prepare, prepare_critic


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """Outcome of the optimizer steps of one batch."""

    grad_norm: float
    learning_rate: float
    optimizer_steps: int
    skipped_steps: int
    skipped_for_loss: int


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Measurements of one trained batch, merged over ranks."""

    loss: float
    """Mean of the policy losses of the optimizer steps."""
    outcome: BatchOutcome
    divergence: Divergence
    kl_coefficient: float
    entropy_bonus: float
    critic: CriticFigures | None = None


def train_batch(
    policy: Policy,
    optimizer: ScheduledOptimizer,
    step: int,
    microbatches: Sequence[Microbatch],
    *,
    settings: AlgorithmSettings,
    ranks: Ranks,
    reference: Policy | None = None,
    teachers: Sequence[Policy] = (),
    critic: Critic | None = None,
    critic_microbatches: Sequence[Microbatch] = (),
    before_step: Callable[[], None] = lambda: None,
) -> TrainedBatch:
    """Train batch `step` on this rank's microbatches; every rank must call it.

    `critic_microbatches` are for a critic with a token budget of its own. `before_step` is called
    before each optimizer step; an exception of it ends the batch with parameters as they are.
    """
    with phase("prepare"):
        prepared = prepare(
            policy,
            microbatches,
            settings=settings,
            ranks=ranks,
            reference=reference,
            teachers=teachers,
            critic=critic,
            critic_microbatches=critic_microbatches,
        )
        of_critic = prepare_critic(prepared, critic_microbatches)
    meter = DivergenceMeter(settings, ranks.device)
    reduces_once = has_room([policy, *([critic.model] if critic else [])], ranks)
    losses, steps = list[float](), list[StepOutcome]()
    for _epoch in range(settings.num_epochs):
        for minibatch in range(settings.num_minibatches):
            share = _share(prepared, minibatch)
            if settings.surrogate in WITH_RATIO_BOUND:
                with phase("prepare"):
                    share = bound_ratios(policy, share, settings.second_moment, ranks)
            loss = _accumulate_all(
                policy, share, meter, settings, critic, reduces_once=reduces_once
            )
            _accumulate_values(critic, _share(of_critic, minibatch), reduces_once=reduces_once)
            losses.append(float(ranks.sum(loss)))
            before_step()
            if critic is not None:
                critic.step(step)
            is_held = critic is not None and critic.is_warming_up(step)
            take = optimizer.discard if is_held else partial(optimizer.step, loss=losses[-1])
            steps.append(take(step))
            meter.policy_moved()
    return TrainedBatch(
        loss=sum(losses) / len(losses),
        outcome=merge_outcomes(steps),
        divergence=meter.merge(ranks),
        kl_coefficient=settings.kl_coefficient,
        entropy_bonus=settings.entropy_bonus,
        critic=None if critic is None else critic.figures(ranks),
    )


def _share(prepared: Sequence[PreparedMicrobatch], minibatch: int) -> list[PreparedMicrobatch]:
    """Choose the microbatches of a minibatch."""
    return [constants for constants in prepared if constants.microbatch.minibatch == minibatch]


def _accumulate_all(
    policy: Policy,
    share: Sequence[PreparedMicrobatch],
    meter: DivergenceMeter,
    settings: AlgorithmSettings,
    critic: Critic | None,
    *,
    reduces_once: bool,
) -> torch.Tensor:
    """Add up the gradients of an optimizer step, without those of a critic's own passes."""
    modules: list[nn.Module] = [policy]
    if critic is not None and not critic.has_own_passes:
        modules.append(critic.model)
    losses = []
    for number, prepared in enumerate(share, start=1):
        for module in modules:
            hold_gradients(module, keeps_whole=reduces_once and number < len(share))
        losses.append(accumulate(policy, prepared, meter, settings, critic))
    return torch.stack(losses).double().sum()


def _accumulate_values(
    critic: Critic | None, share: Sequence[PreparedMicrobatch], *, reduces_once: bool
) -> None:
    """Add up the gradients of a critic, if it has passes of its own."""
    if critic is None or not critic.has_own_passes:
        return
    for number, prepared in enumerate(share, start=1):
        hold_gradients(critic.model, keeps_whole=reduces_once and number < len(share))
        with phase("forward"):
            loss = critic.loss(prepared)
        with phase("backward"):
            loss.backward()


def merge_outcomes(steps: Sequence[StepOutcome]) -> BatchOutcome:
    """Merge the outcomes of a batch's optimizer steps.

    The norm is the largest, NaN if one is not finite; the learning rate is that of the last step.
    """
    norms = [step.grad_norm for step in steps]
    return BatchOutcome(
        grad_norm=max(norms) if all(map(math.isfinite, norms)) else math.nan,
        learning_rate=steps[-1].learning_rate,
        optimizer_steps=len(steps),
        skipped_steps=sum(step.skipped for step in steps),
        skipped_for_loss=sum(not step.is_loss_finite for step in steps),
    )


def accumulate(
    policy: Policy,
    prepared: PreparedMicrobatch,
    meter: DivergenceMeter,
    settings: AlgorithmSettings,
    critic: Critic | None = None,
) -> torch.Tensor:
    """Add one microbatch's gradient to the parameters' and return its share of the policy loss."""
    microbatch = prepared.microbatch
    with phase("forward"):
        loss_of = None
        if is_sum_over_tokens(settings):
            loss_of = partial(_loss_of_places, prepared, settings)
        scores = policy(
            microbatch.sequences,
            microbatch.indices_N,
            entropy_gradient=settings.entropy_bonus > 0,
            loss_of=loss_of,
        )
        outcome = policy_loss(scores.logprobs_N, scores.entropies_N, prepared, settings)
        log_rhos_N = scores.logprobs_N.detach() - microbatch.behaviour_logprobs_N
        deltas_N, from_teacher_N = (
            None if log_other_N is None else scores.logprobs_N.detach() - log_other_N
            for log_other_N in (prepared.log_ref_N, prepared.log_teacher_N)
        )
        total = outcome.loss if scores.loss is None else scores.loss
        if critic is not None and not critic.has_own_passes:
            total = total + critic.loss(prepared, scores.states_MD)
    with phase("backward"):
        total.backward()
    meter.add(
        log_rhos_N,
        scores.entropies_N,
        microbatch,
        outcome,
        deltas_N,
        from_teacher_N=from_teacher_N,
    )
    return outcome.loss.detach()


def _loss_of_places(
    prepared: PreparedMicrobatch,
    settings: AlgorithmSettings,
    places: torch.Tensor | slice,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
) -> torch.Tensor:
    return loss_alone(logprobs, entropies, prepared.select_tokens(places), settings)
