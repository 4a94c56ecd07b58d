"""The way from the output layer's logits to the distribution that a token was drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.architecture import LogitChange


@dataclass(frozen=True, slots=True)
class Softmax:
    """Changes of logits before a softmax, and the dtype that they are computed in."""

    change: LogitChange
    """Of the logits, before anything else."""
    temperature: float
    """Divides the logits."""
    dtype: torch.dtype | None = None
    """In which the layer multiplies and adds up; None = that of its weight."""

    def prepare(self, logits: Tensor) -> Tensor:
        """Change logits of any shape, in place."""
        if self.change.factor != 1.0:
            logits.mul_(self.change.factor)
        if self.change.cap is not None:
            logits.div_(self.change.cap).tanh_().mul_(self.change.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, prepared: Tensor) -> Tensor | float:
        """Differentiate `prepare`, given its result."""
        slope = self.change.factor / self.temperature
        if self.change.cap is None:
            return slope
        tanh = prepared * (self.temperature / self.change.cap)
        return tanh.square_().neg_().add_(1).mul_(slope)
