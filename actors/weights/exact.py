"""Judgement of a probe that is refused for good: float32 decides which side is wrong.

Engine and learner disagree by more than rounding, and pulling again has not changed that. A third
implementation then scores the same tokens with the same bytes: transformers on this machine's CPU,
every product in float32. It shares no kernel with the engine, and neither kernels nor parameters
with the learner. So a side that is far from it is wrong, even a learner that publishes other
weights than its own.

The bytes stay where they are staged. Each module gets its weights in float32 when it is called and
loses them after, so that no more than one matrix is copied at a time, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engine.engine import StagedWeights
from actors.engine.wire_tensors import named_tensors
from broker.protocol.manifest import Probe
from configs.architecture import attention_of

from .probe import LogprobDifference

Exact = Callable[[StagedWeights], Sequence[float]]
"""Log-probs of the probe's tokens 1.. in float32, nats."""


@dataclass(frozen=True, slots=True)
class Float32Differences:
    """Differences of engine and learner from float32."""

    engine: LogprobDifference
    learner: LogprobDifference
    bound: LogprobDifference

    @classmethod
    def from_probe(
        cls, engine: Sequence[float], probe: Probe, exact: Sequence[float], bound: LogprobDifference
    ) -> Float32Differences:
        """Compare engine and learner with float32."""
        theirs = LogprobDifference.from_logprobs(probe.logprobs, exact)
        return cls(LogprobDifference.from_logprobs(engine, exact), theirs, bound)

    @property
    def engine_is_right(self) -> bool:
        """Whether the engine computes the weights that it was given."""
        return self.engine.is_within(self.bound)

    @property
    def learner_is_right(self) -> bool:
        """Whether the learner's log-probs are those of the weights that it has published."""
        return self.learner.is_within(self.bound)

    def __str__(self) -> str:
        """Return the differences, which side is wrong, and what to change."""
        if self.engine_is_right and self.learner_is_right:
            who = "neither is wrong: set actors.probe_tolerance above their difference"
        elif self.learner_is_right:
            who = (
                "the engine is wrong: leave out actors.engine_args, set run.dtype to float32, or "
                "set actors.probe_tolerance if you accept its precision"
            )
        elif self.engine_is_right:
            who = "the learner is wrong: set learner.compile to false, or run.dtype to float32"
        else:
            who = "both are wrong, or this model needs more precision: set run.dtype to float32"
        return (
            f"log-probs computed in float32 from the same bytes differ from the engine's by "
            f"{self.engine} nats and from the learner's by {self.learner}, so {who}"
        )


@torch.no_grad()
def exact_logprobs(model: str, staged: StagedWeights) -> list[float]:
    """Score the probe of a staged version in float32, on the CPU; takes seconds to minutes.

    Args:
        model: Hugging Face directory or hub name, whose shapes the version has.
        staged: The version.

    Returns:
        Log-probs of the probe's tokens 1.., nats.

    Raises:
        WeightsError: The staged file is gone, or was overwritten meanwhile.
        OSError: The model's configuration cannot be read.
        KeyError: The version lacks a tensor of the model.
    """
    config = AutoConfig.from_pretrained(model)
    attention = attention_of(config.to_dict())
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    for module in causal_lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    causal_lm.initialize_weights()  # and buffers; weights have no memory
    manifest = staged.manifest
    tensors = dict(named_tensors(staged.path, manifest.tensors, manifest.num_bytes))
    _lend_weights(causal_lm.eval(), tensors)
    ids_1T = torch.tensor([manifest.probe.token_ids])
    logits_TV = causal_lm(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    scores_T = logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]
    staged.check_not_overwritten()  # bytes in the publisher's memory may have changed meanwhile
    return [float(score) for score in scores_T]


def _lend_weights(causal_lm: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Give each module its weights while it runs; tied ones have one name."""
    names = {id(parameter): name for name, parameter in causal_lm.named_parameters()}

    def lend(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            wide = tensors[names[id(parameter)]].float()
            module.register_parameter(name, nn.Parameter(wide, requires_grad=False))

    def take_back(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            module.register_parameter(name, parameter)

    for module in causal_lm.modules():
        if kept := dict(module.named_parameters(recurse=False)):
            module.register_forward_pre_hook(lambda module, _, kept=kept: lend(module, kept))
            module.register_forward_hook(lambda module, *_, kept=kept: take_back(module, kept))
