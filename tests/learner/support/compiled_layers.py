"""A policy with compiled layers and its like without, over sequences of many lengths.

    python -m tests.learner.support.compiled_layers

compares both with inductor, counts what compiled layers keep, and times them.
"""

from __future__ import annotations

import json
import time

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from console.run.decoder_sizes import ModelShape
from learner.algorithm.microbatch import Sequences
from learner.model.activations import Kept
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks, join
from tests.learner.support.random_models import make_random_model
from tests.learner.support.ranks.forced_shards import forced_shards
from tests.learner.support.tiny_policy import tiny_causal_lm

LENGTHS = [[7, 11, 1], [3, 3, 3, 2], [19, 4], [5, 9, 9, 6]]
"""Of packed sequences; in each pass, the last continues the first."""


def policies(ranks: Ranks, dtype: torch.dtype, kept: Kept) -> tuple[Policy, Policy]:
    """Make an eager policy and a compiled one, with norms in `dtype`."""
    made = []
    for compiled in (False, True):
        policy = Policy(tiny_causal_lm(layers=2).to(dtype), temperature=1.0).eval()
        for module in policy.modules():
            if isinstance(module, Qwen3RMSNorm):
                module.forward = _norm.__get__(module)
        made.append(shard(policy, ranks.mesh, dtype=dtype, activations=kept, compiled=compiled))
    return made[0], made[1]


def _norm(self: Qwen3RMSNorm, states: Tensor) -> Tensor:
    """Normalise without a cast to float32, which a compiler may leave out."""
    variance = states.square().mean(-1, keepdim=True)
    normed: Tensor = self.weight * states * torch.rsqrt(variance + self.variance_epsilon)
    return normed


def gradients(policy: Policy, number: int) -> list[Tensor]:
    """Score one set of sequences, without and with a gradient."""
    lengths = LENGTHS[number]
    rows = [[3 + (7 * row + token) % 17 for token in range(n)] for row, n in enumerate(lengths)]
    prefixes = [None] * (len(rows) - 1) + [0]
    sequences = Sequences.from_token_ids(rows, prefixes=prefixes)
    indices_N = torch.arange(1, lengths[0])
    with torch.no_grad():
        policy(sequences, indices_N)
    scores = policy(sequences, indices_N, entropy_gradient=True)
    (scores.logprobs_N.sum() + scores.entropies_N.square().sum()).backward()
    found = [p.grad for p in policy.parameters() if p.grad is not None]
    whole = [(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in found]
    for parameter in policy.parameters():
        parameter.grad = None
    return whole


def main() -> None:
    """Compare, then time both."""
    ranks = join("cpu", threads=1)
    report: dict[str, object] = {}
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        eager, compiled = policies(ranks, dtype, "full")
        began = time.process_time()
        errors = [
            float((ours - theirs).abs().max() / theirs.abs().max())
            for number in range(len(LENGTHS))
            for ours, theirs in zip(
                gradients(compiled, number), gradients(eager, number), strict=True
            )
        ]
        report[str(dtype)] = max(errors)
        report[f"compiled in, {dtype}"] = time.process_time() - began
        assert max(errors) <= tolerance, errors
    report |= _kept(ranks) | _times(ranks)
    print(json.dumps(report, indent=2))


def _kept(ranks: Ranks) -> dict[str, float]:
    """Bytes that a compiled layer keeps of a token in bfloat16, and those that are computed."""
    shape = {
        "hidden_size": 96,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
    }
    sequences = Sequences.from_token_ids([range(100)] * 7)
    found: list[int] = []
    for layers in (2, 4):
        policy = Policy(
            make_random_model("qwen3", num_hidden_layers=layers, **shape), temperature=1.0
        )
        with forced_shards():  # which casts, as on a card
            shard(policy, ranks.mesh, dtype=torch.bfloat16, compiled=True)
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            if 700 in tensor.shape or tensor.shape[:1] == (7,):  # no weight has such a size
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy(sequences, torch.arange(1, 100))
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    config = {"model_type": "qwen3", "num_hidden_layers": 1, **shape}
    computed = ModelShape.from_config(config).kept("none", 2, is_fused=True)
    measured = (found[1] - found[0]) / 2 / 700
    assert 0.98 < computed / measured < 1.02, (computed, measured)
    return {"kept by a compiled layer": measured, "computed": computed}


def _times(ranks: Ranks) -> dict[str, float]:
    """CPU seconds of a pass over 2,048 tokens of a model 6 layers deep and 256 wide."""
    shape = {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    sequences = Sequences.from_token_ids([range(256)] * 8)
    indices_N = torch.arange(1, 256)
    found: dict[str, float] = {}
    for compiled in (False, True):
        model = make_random_model("qwen3", **shape, vocab_size=256)
        policy = Policy(model, temperature=1.0).eval()
        shard(policy, ranks.mesh, dtype=torch.float32, compiled=compiled)
        seconds = []
        for _ in range(5):
            began = time.process_time()
            policy(sequences, indices_N).logprobs_N.sum().backward()
            seconds.append(time.process_time() - began)
        found["compiled" if compiled else "eager"] = min(seconds)
    return found


if __name__ == "__main__":
    main()
