"""A model of two tensors, and an engine that computes with exactly the bytes it was given.

The engine stands in for vLLM: what is tested is transfer, order and checks, and for these a
softmax over a real matrix shows wrong bytes. A real engine's live swap is tested in tests/actors.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from actors.engine.engine import StagedWeights
from actors.engine.wire_tensors import named_tensors
from buffer.record.episode import PolicyVersion

VOCABULARY, WIDTH = 32, 16
PROBE_IDS = (1, 5, 9, 2, 30)


class ToyModel(nn.Module):
    """Tied like the demo's model; `ballast` makes it as large as a test needs."""

    def __init__(self, ballast: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        self.mix = nn.Linear(WIDTH, WIDTH)
        if ballast:
            self.ballast = nn.Parameter(torch.zeros(ballast))

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.lm_head(self.mix(self.embed(input_ids))))

    def step(self, seed: int) -> None:
        """Change every parameter, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)


@torch.no_grad()
def probe_logprobs(model: nn.Module, token_ids: tuple[int, ...]) -> list[float]:
    """The learner's log-probs of tokens 1.. given those before; every rank must call it."""
    ids_T = torch.tensor(token_ids)
    logits_TV = model(input_ids=ids_T[None]).logits[0, :-1]
    if isinstance(model, FSDPModule):
        model.reshard()  # the root keeps its parameters whole after a forward
    logprobs: list[float] = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].tolist()
    return logprobs


class ToyEngine:
    """Applies staged bytes; `spoil` makes it compute something else, as stale weights would.

    `lag` leaves a tensor behind by a step that no probe sees.
    """

    def __init__(self) -> None:
        self.version = PolicyVersion(0, 0)
        self.weights: dict[str, torch.Tensor] = {}
        self.spoil = self.lag = 0
        self.applied: list[PolicyVersion] = []

    async def apply(self, staged: StagedWeights) -> float:
        weights = self.read(staged)
        staged.check_not_overwritten()
        self.weights = weights
        if self.lag:
            self.lag -= 1
            self.weights["mix.bias"] += 1e-6
        self.version = staged.manifest.version
        self.applied.append(self.version)
        return 0.001

    def tensors(self, staged: StagedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        manifest = staged.manifest
        return named_tensors(staged.path, manifest.tensors, manifest.num_bytes)

    def read(self, staged: StagedWeights) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors(staged)}

    async def read_back(self, staged: StagedWeights) -> list[str] | None:
        return [
            name
            for name, tensor in self.tensors(staged)
            if not torch.equal(tensor, self.weights[name])
        ]

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        ids = torch.tensor(token_ids)
        embed = self.weights["embed.weight"].float()
        if self.spoil:
            self.spoil -= 1
            embed = embed + 1.0
        hidden = (
            embed[ids] @ self.weights["mix.weight"].float().T + self.weights["mix.bias"].float()
        )
        logprobs = (hidden[:-1] @ embed.T).log_softmax(-1)
        return tuple(logprobs.gather(-1, ids[1:, None])[:, 0].tolist())
