"""Memory at the peak of a real step on a CPU, by this process alone or as one of two.

For `test_card_memory.py`. Argument: folder for what rank 0 measured.
"""

from __future__ import annotations

import ctypes
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.learner.arm import measure
from configs.settings import AlgorithmSettings, LearnerSettings, RunSettings, Settings
from learner.data.batch import pack, plan_batch
from learner.model.lora import adapt, reset_adapters
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks, join
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import train_batch
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.ranks.forced_shards import forced_shards
from tests.learner.support.tiny_policy import constant_rate

M_MMAP_THRESHOLD = -3
PROMPT, COMPLETION, EPISODES = 64, 128, 8
MIDDLE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
}


def settings_of(
    *,
    ranks: int,
    microbatches: int,
    kind: str = "none",
    lora_rank: int = 0,
    base_dtype: str | None = None,
) -> Settings:
    """Settings of a step with so many microbatches on each rank."""
    tokens = EPISODES * (PROMPT + COMPLETION) // (ranks * microbatches)
    learner: dict[str, Any] = {
        "ranks": ranks,
        "microbatch_tokens": tokens,
        "activation_checkpointing": kind,
    }
    learner |= {"lora_rank": lora_rank, "base_dtype": base_dtype}
    run = RunSettings(
        model="init",
        environment="calculator",
        dtype="float32",
        max_prompt_tokens=PROMPT,
        max_completion_tokens=COMPLETION,
    )
    return Settings(run=run, learner=LearnerSettings.model_validate(learner))


def peak_bytes(ranks: Ranks, settings: Settings) -> int:
    """Train two batches, and measure how far this process grew."""
    learner, algorithm = settings.learner, AlgorithmSettings()
    episodes = [
        make_episode(n, prompt=range(PROMPT), completion=range(n, n + COMPLETION), reward=n % 2)
        for n in range(EPISODES)
    ]

    def train_twice() -> None:
        causal_lm = Qwen3ForCausalLM(Qwen3Config(**MIDDLE))
        adapt(causal_lm, learner, learner.base_dtype)
        policy = Policy(causal_lm, temperature=1.0).eval()
        kind = learner.activation_checkpointing or "none"
        # With whole weights as on a card; a frozen base is as it is without FSDP2.
        with nullcontext() if learner.base_dtype else forced_shards():
            shard(policy, ranks.mesh, dtype=torch.float32, activations=kind)
        reset_adapters(policy)
        optimizer = ScheduledOptimizer(policy, constant_rate(1e-6), learner)
        plan = plan_batch(
            1,
            episodes,
            ranks=ranks.size,
            settings=algorithm,
            max_completion_tokens=COMPLETION,
            microbatch_tokens=learner.microbatch_tokens,
        )
        own = {row.task_id for row in plan.rows if row.rank == ranks.rank}
        mine = [episode for episode in episodes if episode.task_id in own]
        for step in (1, 2):
            microbatches = pack(plan, mine, settings=algorithm, lineages={1: 0}, lineage=1)
            assert len(microbatches) > 1 or ranks.size == 1
            train_batch(policy, optimizer, step, microbatches, settings=algorithm, ranks=ranks)

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed leaves the process at once
    return int(measure(train_twice)["peak_mib"] * 2**20)


def main(folder: Path) -> None:
    """Measure as one of two ranks."""
    ranks = join("cpu", threads=1)
    measured = peak_bytes(ranks, settings_of(ranks=2, microbatches=2))
    if ranks.is_first:
        (folder / "peak.json").write_text(json.dumps(measured))
    ranks.barrier()
    ranks.destroy_process_group()
