"""A policy with a critic, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from buffer.record.episode import Episode
from configs.settings import AlgorithmSettings, CriticSettings, LearnerSettings
from learner.algorithm.microbatch import Microbatch
from learner.data.batch import pack, plan_batch
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.training.critic import Critic, make_critic
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import TrainedBatch, train_batch
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.tiny_policy import constant_rate, tiny_causal_lm, tiny_policy

VTRACE = AlgorithmSettings(
    advantage="vtrace", correction="none", surrogate="reinforce", proximal="recomputed"
)
HEAD = CriticSettings(kind="head", lr=1e-2)
SHARED = CriticSettings(kind="head", lr=1e-2, trunk_gradient=True)
MODEL = CriticSettings(kind="model", lr=1e-2, rho_bar=2.0, gamma=0.98)
APART = MODEL.model_copy(update={"microbatch_tokens": 60})
"""With a token budget of its own."""


@dataclass(frozen=True)
class Pair:
    """What is trained."""

    policy: Policy
    optimizer: ScheduledOptimizer
    critic: Critic

    def parameters(self) -> list[torch.Tensor]:
        """Copy all parameters, whole; every rank must call it."""
        return _whole([*self.policy.parameters(), *self.critic.model.parameters()])

    def moments(self) -> list[torch.Tensor]:
        """Copy all moments of both optimizers, whole; every rank must call it."""
        return _whole(
            [
                moment
                for optimizer in (self.optimizer, self.critic.optimizer)
                for parameter in optimizer.parameters
                for _, moment in sorted(optimizer.moments_of(parameter).items())
            ]
        )


def _whole(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def make_pair(
    settings: CriticSettings, folder: Path, ranks: Ranks, *, seed: int = 0, kv_heads: int = 1
) -> Pair:
    """Make a tiny policy with its critic; a second model starts from what is in `folder`."""
    if ranks.is_first:
        tiny_causal_lm(seed=seed, kv_heads=kv_heads).save_pretrained(folder / "model")
    ranks.barrier()
    policy = tiny_policy(ranks.mesh, seed=seed, kv_heads=kv_heads, tensor=ranks.tensor)
    policy.sequence_group = ranks.sequence
    critic = make_critic(
        policy,
        settings,
        LearnerSettings(),
        model_path=str(folder / "model"),
        ranks=ranks,
        dtype=torch.float32,
    )
    assert critic is not None
    return Pair(policy, ScheduledOptimizer(policy, constant_rate(1e-3), LearnerSettings()), critic)


def made_microbatches(
    episodes: Sequence[Episode],
    step: int,
    ranks: Ranks,
    *,
    settings: AlgorithmSettings = VTRACE,
    microbatch_tokens: int = 16384,
    critic_tokens: int | None = None,
    of_critic: bool = False,
) -> list[Microbatch]:
    """Plan a batch, and pack this rank's share."""
    plan = plan_batch(
        step,
        episodes,
        ranks=ranks.data_size,
        settings=settings,
        max_completion_tokens=8,
        microbatch_tokens=microbatch_tokens,
        critic_tokens=critic_tokens,
        num_minibatches=settings.num_minibatches,
    )
    own = {*plan.task_ids_of(ranks.data_rank)}
    return pack(
        plan,
        [episode for episode in episodes if episode.task_id in own],
        settings=settings,
        lineages={1: 0},
        lineage=1,
        of_critic=of_critic,
    )


def train_pair(
    pair: Pair,
    step: int,
    ranks: Ranks,
    *,
    settings: AlgorithmSettings = VTRACE,
    microbatch_tokens: int = 16384,
    seed: int | None = None,
    episodes: Sequence[Episode] = (),
    before_step: Callable[[], None] = lambda: None,
) -> TrainedBatch:
    """Train one batch, by default of random episodes whose `seed` is the step's number."""
    episodes = episodes or random_group_episodes(5, 3, seed=step if seed is None else seed)
    critic_tokens = pair.critic.settings.microbatch_tokens
    of_policy, of_critic = (
        made_microbatches(
            episodes,
            step,
            ranks,
            settings=settings,
            microbatch_tokens=microbatch_tokens,
            critic_tokens=critic_tokens,
            of_critic=of_critic,
        )
        for of_critic in (False, True)
    )
    return train_batch(
        pair.policy,
        pair.optimizer,
        step,
        of_policy,
        settings=settings,
        ranks=ranks,
        critic=pair.critic,
        critic_microbatches=of_critic if critic_tokens else [],
        before_step=before_step,
    )
