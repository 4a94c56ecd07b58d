"""The batch and the model that all arms train: groups of eight, log-normal completions."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan

GROUP_SIZE = 8
MEAN_TOKENS, MOST_TOKENS = 200, 1024
SIGMA = 0.8  # of the logarithm: the longest of a group is several times the shortest
VOCABULARY = 32_000


def make_episodes(num_groups: int, *, prompts: tuple[int, int] = (64, 192)) -> list[Episode]:
    """Make the groups of a batch, in the order in which they would arrive."""
    random = np.random.default_rng(17)
    episodes = []
    for group_id in range(num_groups):
        prompt_ids = random.integers(3, VOCABULARY, size=random.integers(*prompts), dtype=np.int32)
        for member in range(GROUP_SIZE):
            drawn = random.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA)
            length = int(np.clip(drawn, 1, MOST_TOKENS))
            token_ids = random.integers(3, VOCABULARY, size=length, dtype=np.int32)
            task_id = group_id * GROUP_SIZE + member
            episodes.append(make_episode(task_id, group_id, prompt_ids, token_ids, VOCABULARY))
    return episodes


def make_episode(
    task_id: int, group_id: int, prompt_ids: np.ndarray, token_ids: np.ndarray, vocabulary: int
) -> Episode:
    """Make an episode of a policy that finds all tokens equally likely."""
    length = len(token_ids)
    return Episode(
        task_id=task_id,
        group_id=group_id,
        purpose="train",
        prompt_ids=prompt_ids,
        completion=Completion(
            token_ids=token_ids,
            behaviour_logprobs=np.full(length, -np.log(vocabulary), dtype=np.float32),
            loss_mask=np.ones(length, dtype=np.uint8),
            versions=(VersionSpan(PolicyVersion(1, 0), 0),),
            fences=(FenceRun(1, "actor", 0),),
        ),
        reward=float(task_id % 2),
        reward_parts={},
        finish_reason="stop",
        environment_metrics={},
        incarnation="actor",
        started_at=0.0,
        finished_at=1.0,
    )


def make_causal_lm(*, layers: int = 6) -> Qwen3ForCausalLM:
    """Make a Qwen3 of 256 wide layers with tied embeddings."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()
