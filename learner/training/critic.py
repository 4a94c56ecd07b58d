"""The critic: values of the states before tokens, their loss and their optimizer.

    kind: head     states of the policy -> linear layer; `trunk_gradient` decides whether the value
                   loss trains the policy's layers too
    kind: model    tokens -> a second model, at first equal to the policy -> linear layer; its
                   passes are its own, and may have a token budget and an offload of their own

It is checkpointed with the policy, but neither published nor part of the saved model.

Shapes: T tokens of all sequences of a microbatch, N of these that are scored, M of these whose
states this rank has, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.settings import CriticSettings, LearnerSettings
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch, Sequences
from learner.model.activations import checkpoint_layers, choose
from learner.model.attention import pack_attention
from learner.model.policy import Policy, compile_layers, release, shard_units, states_before
from learner.model.ranks import Ranks
from learner.model.saved_model import allocate, empty_causal_lm, layers_of, read_weights
from learner.model.sequence_parallel import ALONE, SequenceSplit
from learner.model.tensor_parallel import divide_tensors

from .optimizer import Schedule, ScheduledOptimizer, StepOutcome


class ValueModel(nn.Module):
    """Values of the states before tokens, from states or from a trunk of its own."""

    def __init__(self, width: int, trunk: PreTrainedModel | None, *, trunk_gradient: bool) -> None:
        super().__init__()
        self.sequence_group = ALONE
        """Ranks that share the tokens of a microbatch."""
        self.trunk = trunk
        self.trunk_gradient = trunk_gradient
        self.head = nn.Linear(width, 1)

    def init_weights(self, model_path: str) -> None:
        """Take the first weights: a trunk's are the policy's, and every value is 0.

        Args:
            model_path: Folder or name of the model whose weights a trunk takes.
        """
        if self.trunk is not None:
            read_weights(self.trunk, model_path)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, sequences: Sequences, indices_N: Tensor, states_MD: Tensor | None = None
    ) -> Tensor:
        """Value the states before the tokens at `indices_N`.

        Args:
            sequences: Packed sequences.
            indices_N: Tokens whose states are valued, of all T. Shape [N], int64.
            states_MD: Hidden states of the policy that this rank has; a model with a trunk needs
                none.

        Returns:
            Shape [N, 1], float32: a view of it would lose the hooks that FSDP2 attaches to outputs.
        """
        cut = SequenceSplit(self.sequence_group, sequences, indices_N)
        if self.trunk is not None:
            states_MD = states_before(self.trunk, sequences, cut)
        assert states_MD is not None
        if self.trunk is None and not self.trunk_gradient:
            states_MD = states_MD.detach()
        return cut.gather(self.head(states_MD.float()))


class Critic:
    """A value model with its optimizer, over one batch after the other."""

    def __init__(
        self, model: ValueModel, optimizer: ScheduledOptimizer, settings: CriticSettings
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self._meter = ValueMeter()

    @property
    def has_own_passes(self) -> bool:
        """Whether it has a model of its own, so that it needs no states of the policy."""
        return self.model.trunk is not None

    def is_warming_up(self, step: int) -> bool:
        """Return whether batch `step` trains the critic alone."""
        return step <= self.settings.warmup_batches

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, states_MD: Tensor | None = None) -> Tensor:
        """Value the tokens' states at the beginning of a batch; every rank must call it."""
        values_N = self._values(microbatch, states_MD)
        release(self.model)
        return values_N

    def loss(self, prepared: PreparedMicrobatch, states_MD: Tensor | None = None) -> Tensor:
        """Compute a microbatch's share of the value loss, times its coefficient.

        Args:
            prepared: The microbatch, with values and targets.
            states_MD: As for the model.
        """
        microbatch, old_values_N, targets_N = (
            prepared.microbatch,
            prepared.values_N,
            prepared.targets_N,
        )
        assert old_values_N is not None and targets_N is not None
        values_N = self._values(microbatch, states_MD)
        loss = value_loss(
            values_N, old_values_N, targets_N, microbatch.weights_N, clip=self.settings.clip
        )
        self._meter.add(old_values_N, targets_N, loss)
        return self.settings.coefficient * loss

    def step(self, step: int) -> None:
        """Take one optimizer step of batch `step`; every rank must call it."""
        self._meter.outcomes.append(self.optimizer.step(step))

    def reset(self, model_path: str) -> None:
        """Restore the critic as `make_critic` made it.

        Args:
            model_path: Initial weights of a second model.
        """
        self.model.init_weights(model_path)
        self.optimizer.forget()

    def figures(self, ranks: Ranks) -> CriticFigures:
        """Return the figures of the batch and start those of the next; every rank must call it."""
        meter, self._meter = self._meter, ValueMeter()
        return meter.merge(ranks)

    def _values(self, microbatch: Microbatch, states_MD: Tensor | None) -> Tensor:
        values_N1: Tensor = self.model(microbatch.sequences, microbatch.indices_N, states_MD)
        return values_N1.squeeze(-1)


def make_critic(
    policy: Policy,
    settings: CriticSettings,
    learner: LearnerSettings,
    *,
    model_path: str,
    ranks: Ranks,
    dtype: torch.dtype,
) -> Critic | None:
    """Make and shard the critic; None for `kind: none`.

    Args:
        policy: Policy, whose states have the width of the critic's input.
        settings: Kind, learning rate, and an offload in place of the learner's.
        learner: AdamW's betas, the bound of the gradient norm, activation checkpointing, offload
            and compilation, as for the policy.
        model_path: Initial weights of a second model.
        ranks: Ranks to shard over.
        dtype: Dtype of a second model's forward and backward passes; the head stays in float32.

    Raises:
        SettingsError: A second model cannot be loaded, or does not fit `learner` or `parallel`.
    """
    if settings.kind == "none":
        return None
    if settings.offload is not None:
        learner = learner.model_copy(update={"offload": settings.offload})
    width = int(policy.causal_lm.config.hidden_size)
    trunk = None
    if settings.kind == "model":
        causal_lm = empty_causal_lm(model_path)
        pack_attention(causal_lm)
        trunk = cast("PreTrainedModel", causal_lm.base_model)
    model = ValueModel(width, trunk, trunk_gradient=settings.trunk_gradient)
    model.sequence_group = ranks.sequence
    divide_tensors(model, ranks.tensor)
    layers = [] if model.trunk is None else layers_of(model.trunk)
    if learner.compile:
        compile_layers(layers, ranks.mesh.device_type)
    kept = choose(learner, model, ranks.device)
    checkpoint_layers(layers, kept, offload="activations" in learner.offload)
    offload = "parameters" in learner.offload
    shard_units(model.head, [], ranks.mesh, dtype=torch.float32, offload=offload)
    shard_units(model, layers, ranks.mesh, dtype=dtype, offload=offload)
    allocate(model, ranks.device, offload=offload)
    model.init_weights(model_path)
    constant = Schedule(peak=settings.lr, warmup_steps=0, decay="constant", min_ratio=1.0, steps=1)
    return Critic(model.eval(), ScheduledOptimizer(model, constant, learner), settings)


def value_loss(
    values_N: Tensor,
    old_values_N: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    *,
    clip: float | None,
) -> Tensor:
    """Compute half the squared distance to the targets, with the weights of the policy's loss.

    With V_c = V_old + clamp(V - V_old, -clip, clip) the larger of (V - y)^2 and (V_c - y)^2 counts:
    a value that has moved by more than `clip` towards its target has no gradient left.

    Args:
        values_N: V, with gradient. Shape [N].
        old_values_N: V at the beginning of the batch. Shape [N].
        targets_N: y. Shape [N].
        weights_N: Over counts of the whole batch, so shares of microbatches and ranks add up.
        clip: None = the plain squared distance.

    Source:
        Schulman et al. 2017, arXiv:1707.06347; the clipping is that of its published code, as
        Engstrom et al. 2020, arXiv:2005.12729 (value function clipping), describe it.
    """
    assert values_N.shape == old_values_N.shape == targets_N.shape == weights_N.shape
    squares_N = (values_N - targets_N).square()
    if clip is not None:
        clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        squares_N = torch.maximum(squares_N, (clipped_N - targets_N).square())
    return 0.5 * (weights_N * squares_N).sum()


@dataclass(frozen=True, slots=True)
class CriticFigures:
    """Figures of the critic over one batch, merged over ranks: docs/metrics.md."""

    value_loss: float
    value_mean: float
    explained_variance: float
    critic_grad_norm: float


class ValueMeter:
    """Accumulates `CriticFigures` on the device, without synchronising with it.

    Several epochs count each token several times, which changes none of the means.
    """

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        """Outcome of each optimizer step."""
        self._sums: Tensor | float = 0.0

    @torch.no_grad()
    def add(self, values_N: Tensor, targets_N: Tensor, loss: Tensor) -> None:
        """Count a microbatch: its values at the beginning of the batch, its share of the loss."""
        values_N, targets_N = values_N.double(), targets_N.double()
        errors_N = targets_N - values_N
        terms = [torch.ones_like(values_N), values_N, targets_N, errors_N]
        terms += [targets_N.square(), errors_N.square()]
        self._sums = self._sums + torch.stack([*(term.sum() for term in terms), loss.double()])

    def merge(self, ranks: Ranks) -> CriticFigures:
        """Merge all ranks; every rank must call it."""
        assert isinstance(self._sums, Tensor)  # no rank is without a microbatch
        num, value, target, error, target_squared, error_squared, loss = ranks.sum(
            self._sums
        ).tolist()
        num = max(1.0, num)
        target_variance = target_squared / num - (target / num) ** 2
        error_variance = error_squared / num - (error / num) ** 2
        return CriticFigures(
            value_loss=loss / len(self.outcomes),
            value_mean=value / num,
            explained_variance=1 - error_variance / target_variance if target_variance > 0 else 0.0,
            critic_grad_norm=max(outcome.grad_norm for outcome in self.outcomes),
        )
