"""A frozen base in each of its dtypes: bytes, and how far loss and gradients of adapters move.

    python -m tests.learner.support.frozen_base MODEL

Adapters of rank 16 are trained for four steps beside the base in float32, rounded to bfloat16 as
it is published; each dtype then computes the same loss with the same adapters. One thread of a CPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from configs.settings import LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.model.lora import adapt, begin_adapters
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks, join
from learner.model.saved_model import allocate, empty_causal_lm, read_weights

ROWS = Path(__file__).parents[3] / "configs" / "smollm2_train.jsonl"
TOKENS = 1024
BASES = ("float32", "bfloat16", "nf4")
LEAST_COSINE = 0.5
"""For a model of 135 million parameters; larger ones bear four bits better."""


class Found(NamedTuple):
    """What one pass gave."""

    loss: float
    logprobs_N: Tensor
    gradients: Tensor
    frozen_bytes: int
    seconds: float
    """Of CPU time."""


def make_policy(path: str, base: str, ranks: Ranks) -> Policy:
    """Load a policy with adapters as the learner of one rank does."""
    settings = LearnerSettings.model_validate({"lora_rank": 16, "base_dtype": base})
    causal_lm = empty_causal_lm(path)
    adapt(causal_lm, settings, base)
    policy = Policy(causal_lm, temperature=1.0).eval()
    shard(policy, ranks.mesh, dtype=torch.float32)
    allocate(policy, ranks.device)
    read_weights(causal_lm, path)
    policy.adapter = begin_adapters(causal_lm, settings, dtype="bfloat16", ranks=ranks)
    return policy


def texts_of(path: str) -> list[list[int]]:
    """Tokens of rows until there are enough."""
    tokenizer, texts = AutoTokenizer.from_pretrained(path), list[list[int]]()
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts.append(tokenizer.encode(f"{row['question']} {row['answer']}"))
        if sum(map(len, texts)) >= TOKENS:
            break
    return texts


def differentiate(policy: Policy, texts: list[list[int]]) -> Found:
    """Compute a loss with random advantages, and its gradients."""
    starts = {sum(map(len, texts[:n])) for n in range(len(texts))}
    places = torch.tensor([n for n in range(sum(map(len, texts))) if n not in starts])
    advantages_N = torch.randn(len(places), generator=torch.Generator().manual_seed(0))
    trained = [each for each in policy.parameters() if each.requires_grad]
    for each in trained:
        each.grad = None
    began = time.process_time()
    logprobs_N = policy(Sequences.from_token_ids(texts), places).logprobs_N
    loss = -(logprobs_N * advantages_N).mean()
    loss.backward()
    seconds = time.process_time() - began
    gradients = torch.cat(
        [each.grad.double().flatten() for each in trained if each.grad is not None]
    )
    frozen = sum(each.nbytes for each in policy.parameters() if not each.requires_grad)
    return Found(float(loss.detach()), logprobs_N.detach(), gradients, frozen, seconds)


def main() -> int:
    """Print a row for each dtype; 1 where four bits turn the gradient further than they may."""
    path, ranks = sys.argv[1], join("cpu", threads=1)
    texts = texts_of(path)
    policy = make_policy(path, "float32", ranks)
    trained = [each for each in policy.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(4):
        differentiate(policy, texts)
        optimizer.step()
    adapters = [each.detach().clone() for each in trained]
    del policy, optimizer, trained
    wide: Found | None = None
    least = 1.0
    for base in BASES:
        policy = make_policy(path, base, ranks)
        own = [each for each in policy.parameters() if each.requires_grad]
        with torch.no_grad():
            for each, value in zip(own, adapters, strict=True):
                each.copy_(value)
        passes = [differentiate(policy, texts) for _ in range(3)]
        found, wide = passes[0], wide or passes[0]
        cosine = float(torch.cosine_similarity(found.gradients, wide.gradients, dim=0))
        least = min(least, cosine)
        cells = (
            f"{base} | {found.frozen_bytes / 2**20:.0f} | {found.loss:.4f}",
            f"{float((found.logprobs_N - wide.logprobs_N).abs().mean()):.4f} | {cosine:.4f}",
            f"{float(found.gradients.norm() / wide.gradients.norm()):.3f}",
            f"{min(each.seconds for each in passes):.2f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    ranks.destroy_process_group()
    return int(least < LEAST_COSINE)


if __name__ == "__main__":
    raise SystemExit(main())
