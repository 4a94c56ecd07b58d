"""Steps of a Qwen3 of any size on cards, as the learner takes them, with any of its switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.settings import AlgorithmSettings, LearnerSettings, RunSettings, Settings
from learner.data.batch import BatchPlan, pack, plan_batch
from learner.model.activations import choose
from learner.model.lora import adapt, reset_adapters
from learner.model.memory_rules import base_dtype
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import train_batch
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_policy import constant_rate

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
}
QWEN3_600M = SMALL | {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
ALGORITHM = AlgorithmSettings()


@dataclass(frozen=True, slots=True)
class Load:
    """What a batch has."""

    episodes: int
    prompt: int
    completion: int
    microbatch_tokens: int


LOAD_OF_PEAKS = Load(episodes=16, prompt=256, completion=768, microbatch_tokens=8192)
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
SWITCHES: dict[str, dict[str, Any]] = {
    "compile": {"compile": True},
    "compile, full": FULL | {"compile": True},
    "full": FULL,
    "selective": {"activation_checkpointing": "selective"},
    "inputs in host memory": {"offload": ["activations"]},
    "parameters in host memory": {"offload": ["parameters"]},
    "both": {"offload": ["parameters", "activations"]},
}
PEAKS: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpointing": "none"},
    **SWITCHES,
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adapters": {"lora_rank": 16, "base_dtype": "float32"},
}
"""Those whose memory is computed."""


def settings_of(load: Load, learner: Mapping[str, Any], dtype: str = "float32") -> Settings:
    """Settings of such a batch."""
    run = RunSettings(
        model="init",
        environment="calculator",
        dtype=dtype,
        max_prompt_tokens=load.prompt,
        max_completion_tokens=load.completion,
    )
    table = {"microbatch_tokens": load.microbatch_tokens, **learner}
    return Settings(run=run, learner=LearnerSettings.model_validate(table))


class Training:
    """A policy, its optimizer and one batch, which is trained again and again."""

    def __init__(
        self, ranks: Ranks, shape: Mapping[str, Any], load: Load, settings: Settings
    ) -> None:
        learner, self.ranks = settings.learner, ranks
        torch.manual_seed(0)
        causal_lm = Qwen3ForCausalLM(Qwen3Config(**shape))
        is_narrow = settings.run.dtype == "bfloat16"
        adapt(causal_lm, learner, base_dtype(learner.base_dtype, is_narrow=is_narrow))
        policy = Policy(causal_lm, temperature=1.0).eval()
        policy.sequence_group = ranks.sequence
        self.policy = shard(
            policy,
            ranks.mesh,
            dtype=torch.bfloat16 if is_narrow else torch.float32,
            activations=choose(learner, policy, ranks.device),
            offload=learner.offload,
            compiled=learner.compile,
        )
        reset_adapters(policy.causal_lm)
        self.optimizer = ScheduledOptimizer(policy, constant_rate(1e-4), learner)
        random = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, 1000, (load.episodes, load.completion), generator=random)
        episodes = [
            make_episode(
                number,
                group_id=number // 4,
                prompt=[3 + (number // 4 + token) % 900 for token in range(load.prompt)],
                completion=row.tolist(),
                reward=float(number % 2),
            )
            for number, row in enumerate(tokens)
        ]
        plan = plan_batch(
            1,
            episodes,
            ranks=ranks.data_size,
            settings=ALGORITHM,
            max_completion_tokens=load.completion,
            microbatch_tokens=learner.microbatch_tokens,
        )
        plan = BatchPlan.decode(ranks.broadcast(plan.encode() if ranks.is_first else None))
        own = {*plan.task_ids_of(ranks.data_rank)}
        mine = [episode for episode in episodes if episode.task_id in own]
        self.microbatches = pack(plan, mine, settings=ALGORITHM, lineages={1: 0}, lineage=1)

    def step(self, number: int) -> float:
        """Train the batch; its loss."""
        return train_batch(
            self.policy,
            self.optimizer,
            number,
            self.microbatches,
            settings=ALGORITHM,
            ranks=self.ranks,
        ).loss

    def parameters(self) -> list[Tensor]:
        """Gather the parameters into host memory; every rank must call it."""
        on_card = [p.detach().to(self.ranks.device) for p in self.policy.parameters()]
        return [(p.full_tensor() if isinstance(p, DTensor) else p).cpu() for p in on_card]
