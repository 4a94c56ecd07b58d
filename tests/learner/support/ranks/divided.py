"""One rank of two that divide matrices: trains policies with critics, publishes, reads models.

For `test_tensor_parallel.py`. Argument: folder with models in `saved`, and for the findings.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from configs.settings import ParallelSettings
from learner.model.policy import probe_scores, rounded_logprobs
from learner.model.ranks import Ranks, join
from learner.weights.gather import whole_tensors
from tests.learner.support.made_critic import HEAD, MODEL, SHARED, make_pair, train_pair
from tests.learner.support.random_models import differences

PROBE = (3, 9, 4, 4, 17)
NUMBERS = (0.1, 0.999, 0.5, 0.8)


def train_critics(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train a policy with each kind of critic for two batches; figures, and what is published."""
    found: dict[str, Any] = {
        "figures": [],
        "parameters": [],
        "published": [],
        "probes": [],
        "drawn": [],
        "rounded": [],
    }
    for settings in (HEAD, SHARED, MODEL):
        pair = make_pair(settings, folder, ranks, kv_heads=2)
        for step in (1, 2):
            trained = train_pair(pair, step, ranks, microbatch_tokens=24)
            assert trained.critic is not None
            found["figures"].append(asdict(trained.critic))
        found["parameters"] += pair.parameters()
        found["published"] += [t.clone() for t in whole_tensors(pair.policy.causal_lm, "float32")]
        logprobs, drawn = probe_scores(pair.policy, PROBE, NUMBERS)
        found["probes"] += logprobs
        found["drawn"] += drawn
        found["rounded"] += rounded_logprobs(pair.policy, PROBE, dtype=torch.bfloat16)
    return found


def main(folder: Path) -> None:
    """Train and read, and write down what was found."""
    ranks = join("cpu", threads=1, parallel=ParallelSettings(tensor=2))
    assert (ranks.data_rank, ranks.data_size) == (0, 1), "both run all tokens"
    critic = make_pair(MODEL, folder, ranks, kv_heads=2).critic
    for each in critic.optimizer.parameters:
        assert isinstance(each, DTensor) and each.device_mesh.ndim == 2
    found = train_critics(folder, ranks)
    saved = sorted((folder / "saved").iterdir())
    found["differences"] = {f.name: differences(f, ranks.mesh, ranks.tensor) for f in saved}
    torch.save(found, folder / f"found-{ranks.rank}.pt")
    ranks.barrier()
    ranks.destroy_process_group()
