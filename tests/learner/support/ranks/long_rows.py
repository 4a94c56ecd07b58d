"""One rank of one, two or four that share a long row: its loss, gradients, peak memory and time.

Argument: folder with the records of a batch, how to train them (`case.json`), and for the findings.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from buffer.record.codec import decode_episode
from configs.settings import AlgorithmSettings
from learner.algorithm.microbatch import PreparedMicrobatch
from learner.data.batch import pack, plan_batch
from learner.model import attention
from learner.model.policy import Policy, shard
from learner.model.ranks import join
from learner.training.divergence import DivergenceMeter
from learner.training.step import accumulate
from tests.learner.support.random_models import make_random_model
from tests.learner.support.ranks.layouts import arranged, whole

SETTINGS = AlgorithmSettings(entropy_bonus=0.01)
FAMILY = "qwen3"
MICROBATCH_TOKENS = 1024  # less than a row has


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(folder: Path) -> None:
    """Train a batch, and let each rank write down what it took."""
    ranks = join("cpu", threads=1)
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    there = arranged(ranks, {"sequence": ranks.size})
    policy = Policy(make_random_model(FAMILY, **case["shape"]), temperature=1.0).eval()
    policy.sequence_group = there.sequence
    policy = shard(policy, there.mesh, dtype=torch.float32, tensor=there.tensor)
    before, began = peak_bytes(), time.monotonic()
    episodes = [decode_episode(path.read_bytes()) for path in sorted(folder.glob("*.record"))]
    plan = plan_batch(
        1,
        episodes,
        ranks=1,
        settings=SETTINGS,
        max_completion_tokens=case["tokens"],
        microbatch_tokens=MICROBATCH_TOKENS if case["alone"] else 10**9,
    )
    microbatches = pack(plan, episodes, settings=SETTINGS, lineages={1: 0}, lineage=1)
    meter = DivergenceMeter(SETTINGS, torch.device("cpu"))
    with mock.patch.object(attention, "WEIGHTS_AT_ONCE", case["weights_at_once"]):
        losses = [accumulate(policy, PreparedMicrobatch(m), meter, SETTINGS) for m in microbatches]
    found = {
        "loss": float(there.sum(torch.stack(losses).double().sum())),
        "longest": max(len(m.sequences.token_ids_T) for m in microbatches),
        "shares_prompts": any(m.sequences.seen is not None for m in microbatches),
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": peak_bytes() - before,
    }
    gradients = {name: whole(p.grad) for name, p in policy.named_parameters()}
    (folder / f"found-{ranks.size}-{ranks.rank}.json").write_text(json.dumps(found))
    if ranks.is_first:
        torch.save(gradients, folder / f"gradients-{ranks.size}.pt")
    ranks.barrier()
    ranks.destroy_process_group()
