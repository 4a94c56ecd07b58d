"""AdamW or Muon with warm-up, decay and gradient clipping; steps that are not finite are skipped.

Muon (https://kellerjordan.github.io/posts/muon/, torch.optim.Muon) steps along the nearest
orthogonal matrix to the momentum of a matrix's gradient. Embeddings, output layer and vectors keep
AdamW. Its steps are as long as AdamW's (https://arxiv.org/abs/2502.16982), so rates carry over.

Owns one optimizer step. The schedule is a function of the batch number alone, so a resumed run
needs no state of it; the guards' factor on the rate is part of their state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.settings import LearnerSettings
from learner.profiling.phases import phase


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate of each batch: linear warm-up, then constant, linear or cosine decay."""

    peak: float
    warmup_steps: int
    decay: str
    min_ratio: float
    steps: int
    """Batches of the run; the decay ends at the last one."""

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
    """Applies accumulated gradients once for each batch."""

    def __init__(self, model: nn.Module, schedule: Schedule, settings: LearnerSettings) -> None:
        self.schedule = schedule
        self.max_grad_norm = settings.max_grad_norm
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.steps_taken = 0
        self.rate_scale = 1.0
        """Factor on the schedule's rate, set from the guards."""
        of_muon = set(_matrices_of_layers(model)) if settings.optimizer == "muon" else set()
        rest = [parameter for parameter in self.parameters if parameter not in of_muon]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest,
                lr=schedule.peak,
                betas=(settings.adam_beta1, settings.adam_beta2),
                weight_decay=settings.weight_decay,
                fused=True,  # one pass over memory; on a CPU a third of the time of the plain loop
            )
        ]
        if of_muon:
            muon = torch.optim.Muon(
                [parameter for parameter in self.parameters if parameter in of_muon],
                lr=schedule.peak,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._optimizers.append(muon)
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
        """Name what is kept for a parameter after its first step."""
        is_muon = isinstance(self._optimizer_of[parameter], torch.optim.Muon)
        return {"momentum_buffer"} if is_muon else {"step", "exp_avg", "exp_avg_sq"}

    def forget(self) -> None:
        """Clear all moments."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def step(self, step: int | None = None, *, loss: float = 0.0) -> StepOutcome:
        """Clip, apply and clear the gradients of batch `step` (default: the next one).

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
        """Discard the gradients of batch `step`; parameters and moments stay as they are."""
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


def _matrices_of_layers(model: nn.Module) -> Iterator[nn.Parameter]:
    for name, parameter in model.named_parameters():
        if ".layers." in f".{name}" and parameter.ndim == 2 and parameter.requires_grad:
            yield parameter
