"""A toy model of which an adapter alone is trained."""

from typing import Any

import torch

from learner.model.lora import AdaptedLinear, reset_adapters
from tests.weights.support.toy_model import ToyModel

SCALE = 5.0 / 3.0


class AdaptedToy(ToyModel):
    """Frozen, but for an adapter beside its one matrix."""

    def __init__(self, ballast: int = 1000) -> None:
        super().__init__(ballast)
        super().step(1)
        self.requires_grad_(requires_grad=False)
        self.mix: Any = AdaptedLinear(self.mix, rank=2, scale=SCALE)
        reset_adapters(self)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for part in (self.mix.lora_a, self.mix.lora_b):
                part.copy_(torch.rand(part.shape, generator=generator) - 0.5)
