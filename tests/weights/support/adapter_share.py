"""How much of what adapters learn reaches actors in bfloat16, by rate and step.

    python -m tests.weights.support.adapter_share MODEL

Two texts are trained on with random advantages. Both sides compute in float32, so that nothing but
the rounding of merged weights counts: to the nearest value, and as versions are published.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from configs.settings import LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.model.lora import AdaptedLinear, adapt, reset_adapters
from learner.model.policy import Policy
from learner.model.saved_model import load_causal_lm

RATES = (1e-5, 1e-4)
STEPS = (1, 4, 12)
TEXTS = (
    "Ben reads 12 pages a day for 5 days, and 40 pages of the book are left: it has 100 pages.",
    "The shop sold 18 pens at 3 coins each and gave 6 coins back, so 48 coins were left.",
)


class Share(NamedTuple):
    """What arrives: of the weights' change, of the log-probs', and how far these are apart."""

    weights: float
    nats: float
    gap: float


def nearest(module: AdaptedLinear) -> Tensor:
    """Merge and round to the nearest value."""
    return module.merged(torch.float32).bfloat16()


def published(module: AdaptedLinear) -> Tensor:
    """Merge as a version is."""
    return module.merged(torch.bfloat16)


@torch.no_grad()
def share(
    policy: Policy,
    score: Callable[[nn.Module], Tensor],
    first_N: Tensor,
    merge: Callable[[AdaptedLinear], Tensor],
) -> Share:
    """Compare the learner with an actor of merged weights.

    Args:
        policy: The learner's.
        score: Log-probs of the texts by a policy.
        first_N: Those before the first step.
        merge: Of one layer.
    """
    actor = copy.deepcopy(policy)
    arrived = wanted = 0.0
    for module in actor.modules():
        if isinstance(module, AdaptedLinear):
            change = module.scale * (module.lora_b @ module.lora_a)
            merged = merge(module).float()
            arrived += float(((merged - module.weight) * change).sum())
            wanted += float((change**2).sum())
            module.weight.copy_(merged)
            module.lora_b.zero_()
    ours_N, theirs_N = score(policy) - first_N, score(actor) - first_N
    return Share(
        arrived / wanted,
        float((theirs_N * ours_N).sum() / (ours_N**2).sum()),
        float((theirs_N - ours_N).abs().mean() / ours_N.abs().mean()),
    )


def main() -> int:
    """Print a row for each rate and step; 1 if less than 97 % of the weights' change arrives."""
    path = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer.encode(text) for text in TEXTS]
    starts = {0, len(texts[0])}
    places = torch.tensor([n for n in range(sum(map(len, texts))) if n not in starts])

    def score(policy: nn.Module) -> Tensor:
        logprobs_N: Tensor = policy(Sequences.from_token_ids(texts), places).logprobs_N
        return logprobs_N

    least = 1.0
    for rate in RATES:
        causal_lm = load_causal_lm(path)
        adapt(causal_lm, LearnerSettings(lora_rank=16))
        with torch.no_grad():
            for parameter in causal_lm.parameters():
                parameter.copy_(parameter.bfloat16())
        reset_adapters(causal_lm)
        policy = Policy(causal_lm, temperature=1.0).eval()
        trained = [each for each in policy.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        with torch.no_grad():
            first_N = score(policy)
        advantages_N = torch.randn(len(first_N), generator=torch.Generator().manual_seed(0))
        for step in range(1, STEPS[-1] + 1):
            optimizer.zero_grad()
            (-(score(policy) * advantages_N).mean()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            if step in STEPS:
                found = [share(policy, score, first_N, merge) for merge in (nearest, published)]
                cells = [f"{part:.1%}" for each in found for part in each]
                print(f"| {rate:g} | {step} | {' | '.join(cells)} |", flush=True)
                least = min(least, found[1].weights)
    return int(least < 0.97)


if __name__ == "__main__":
    raise SystemExit(main())
