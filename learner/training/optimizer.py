"""AdamW or Muon with warm-up, decay and gradient clipping; steps that are not finite are skipped.

`adamw_8bit.py` has an AdamW for matrices whose moments are small.

Muon (https://kellerjordan.github.io/posts/muon/, torch.optim.Muon) steps along the nearest
orthogonal matrix to the momentum of a matrix's gradient. Embeddings, output layer and vectors keep
AdamW. Its steps are as long as AdamW's (https://arxiv.org/abs/2502.16982), so rates carry over.

Owns one optimizer step. The schedule is a function of the batch number alone, so a resumed run
needs no state of it; the guards' factor on the rate is part of their state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.settings import LearnerSettings, Settings
from learner.profiling import phase

from .adamw_8bit import AdamW8bit


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate of each batch: linear warm-up, then constant, linear or cosine decay."""

    peak: float
    warmup_steps: int
    decay: str
    min_ratio: float
    steps: int
    """Batches of the run; the decay ends at the last one."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Schedule:
        """Make the schedule of a run."""
        learner = settings.learner
        return cls(
            peak=learner.lr,
            warmup_steps=learner.lr_warmup_steps,
            decay=learner.lr_decay,
            min_ratio=learner.lr_min_ratio,
            steps=settings.run.steps,
        )

    def rate(self, step: int) -> float:
        """Learning rate of batch `step`, the first being 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.decay == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        progress = min(1.0, progress)
        share = 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * share)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of one optimizer step."""

    grad_norm: float
    """Over all parameters and ranks, before clipping; not finite where the step was skipped."""
    learning_rate: float
    skipped: bool
    """Loss or gradient were not finite, so parameters and moments stayed as they were."""
    is_loss_finite: bool = True


class ScheduledOptimizer:
    """Applies accumulated gradients, at the learning rate of their batch."""

    def __init__(self, model: nn.Module, schedule: Schedule, settings: LearnerSettings) -> None:
        self.schedule = schedule
        self.max_grad_norm = settings.max_grad_norm
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.steps_taken = 0
        self.rate_scale = 1.0
        """Factor on the schedule's rate, set from the guards."""
        self._optimizers = list(_optimizers(model, schedule.peak, settings))
        self._optimizer_of = {
            parameter: optimizer
            for optimizer in self._optimizers
            for parameter in optimizer.param_groups[0]["params"]
        }

    def moments_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, to be read or filled; none before its first step."""
        kept: dict[str, Tensor] = self._optimizer_of[parameter].state[parameter]
        return kept

    def names_of_moments(self, parameter: nn.Parameter) -> set[str]:
        """Name the moments that are kept for a parameter after its first step."""
        return NAMES[type(self._optimizer_of[parameter])]

    def forget(self) -> None:
        """Clear the moments of all parameters, as before the first step."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def step(self, step: int | None = None, *, loss: float = 0.0) -> StepOutcome:
        """Clip, apply and clear the gradients of batch `step` (default: the next one). Collective.

        Parameters and moments stay as they are if the loss or the norm is not finite; both are
        merged over ranks, so all ranks skip together.
        """
        step = self.steps_taken + 1 if step is None else step
        grad_norm = self._clip()
        rate = self.schedule.rate(step) * self.rate_scale
        is_loss_finite = math.isfinite(loss)
        skipped = not (is_loss_finite and math.isfinite(grad_norm))
        if not skipped:
            with phase("optimizer"):
                for optimizer in self._optimizers:
                    optimizer.param_groups[0]["lr"] = rate
                    optimizer.step()
        self._clear_gradients()
        self.steps_taken = step
        return StepOutcome(grad_norm, rate, skipped, is_loss_finite)

    def discard(self, step: int) -> StepOutcome:
        """Discard the gradients of batch `step`; parameters and moments stay as they are.

        The outcome has the norm of the gradients and a learning rate of 0, and is not `skipped`.
        """
        grad_norm = self._clip()
        self._clear_gradients()
        self.steps_taken = step
        return StepOutcome(grad_norm=grad_norm, learning_rate=0.0, skipped=False)

    def _clip(self) -> float:
        """Clip the gradients to `max_grad_norm`, and return their norm before clipping."""
        with phase("clip"):
            norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm, foreach=True)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


NAMES: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Muon: {"momentum_buffer"},
    AdamW8bit: {"step", "exp_avg_codes", "exp_avg_scales", "root_codes", "root_scales"},
}
"""Names of the moments that an optimizer keeps for a parameter."""


def _optimizers(
    model: nn.Module, rate: float, settings: LearnerSettings
) -> Iterator[torch.optim.Optimizer]:
    """Make the optimizer that `learner.optimizer` names for matrices, and AdamW for the rest."""
    betas, decay = (settings.adam_beta1, settings.adam_beta2), settings.weight_decay
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {} if settings.optimizer == "adamw" else dict(_matrices(trained, settings.optimizer))
    rest = [p for name, p in trained.items() if name not in matrices]
    # Fused: one pass over memory; on a CPU a third of the time of the plain loop.
    yield torch.optim.AdamW(rest, lr=rate, betas=betas, weight_decay=decay, fused=True)
    chosen = [*matrices.values()]
    if chosen and settings.optimizer == "muon":
        fn = "match_rms_adamw"
        yield torch.optim.Muon(chosen, lr=rate, weight_decay=decay, adjust_lr_fn=fn)
    elif chosen:
        yield AdamW8bit(chosen, lr=rate, betas=betas, weight_decay=decay)


def _matrices(
    trained: Mapping[str, nn.Parameter], optimizer: str
) -> Iterator[tuple[str, nn.Parameter]]:
    """Choose the matrices for an optimizer other than AdamW: Muon leaves embeddings out."""
    for name, parameter in trained.items():
        if parameter.ndim == 2 and (optimizer != "muon" or ".layers." in f".{name}"):
            yield name, parameter
