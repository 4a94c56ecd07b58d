"""Training in float64 with plain gradient descent, by one rank or by this process as one of two.

What differs is how a batch is cut: so loss and gradients may differ by rounding alone. AdamW would
blow up the rounding of a gradient near zero: gradients are followed as they are, on a replica on
each rank, and kept as they are, of a sharded model. Run by `test_step.py`; argument: folder for the
findings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.settings import AlgorithmSettings
from learner.algorithm.microbatch import Microbatch
from learner.data.batch import pack, plan_batch
from learner.model import memory_rules
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks, join
from learner.training.optimizer import ScheduledOptimizer, StepOutcome
from learner.training.step import train_batch
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.padded import StayWide
from tests.learner.support.random_models import FAMILIES, make_random_model
from tests.learner.support.tiny_policy import tiny_policy

SEVERAL = {"num_epochs": 2, "num_minibatches": 2}
CASES: list[dict[str, Any]] = [
    {"surrogate": "clip", **SEVERAL},
    {"proximal": "recomputed", "aggregation": "sequence", "correction": "seq_tis", **SEVERAL},
    {"proximal": "recomputed", "surrogate": "gspo", "correction": "geo_mask", **SEVERAL},
    {"correction": "none", "surrogate": "gmpo", "aggregation": "sequence_sum", **SEVERAL},
    {"correction": "none", "surrogate": "topr", "aggregation": "dr_grpo"},
    {"correction": "none", "surrogate": "m2po", "second_moment": 0.5, **SEVERAL},
    {"proximal": "interpolated", "correction": "token_veto", "veto": 0.2},
]
WIDE = {"geo_low": 0.1, "geo_high": 10.0, "rho_bar": 3.0}


class Descent:
    """Stands in for AdamW: adds the gradients of all ranks up, keeps them, and follows them."""

    def __init__(self, policy: Policy, ranks: Ranks, rate: float = 0.5) -> None:
        self._policy = policy
        self._ranks = ranks
        self._rate = rate
        self.gradients: list[Tensor] = []

    def step(self, step: int | None = None, *, loss: float = 0.0) -> StepOutcome:
        """Follow the gradient."""
        parts = []
        for parameter in self._policy.parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole = self._ranks.sum(own)
            parameter.data -= self._rate * whole
            parameter.grad = None
            parts.append(whole.flatten())
        self.gradients.append(torch.cat(parts))
        return StepOutcome(
            grad_norm=float(self.gradients[-1].norm()), learning_rate=self._rate, skipped=False
        )


def train(case: dict[str, Any], ranks: Ranks, *, microbatch_tokens: int) -> tuple[float, Tensor]:
    """Train one batch; loss, and the gradient of each optimizer step. Shape [steps, parameters]."""
    settings = AlgorithmSettings.model_validate({**WIDE, **case})
    microbatches = _microbatches(settings, ranks, microbatch_tokens)
    policy = tiny_policy().double()
    descent = Descent(policy, ranks)
    optimizer = cast("ScheduledOptimizer", descent)
    trained = train_batch(policy, optimizer, 3, microbatches, settings=settings, ranks=ranks)
    return trained.loss, torch.stack(descent.gradients)


def _microbatches(
    settings: AlgorithmSettings, ranks: Ranks, microbatch_tokens: int
) -> list[Microbatch]:
    """Plan a batch, and pack this rank's share."""
    episodes = random_group_episodes(4, 3, seed=1)
    plan = plan_batch(
        3,
        episodes,
        ranks=ranks.size,
        settings=settings,
        max_completion_tokens=8,
        microbatch_tokens=microbatch_tokens,
        num_minibatches=settings.num_minibatches,
    )
    own = {row.task_id for row in plan.rows if row.rank == ranks.rank}
    return pack(
        plan,
        [episode for episode in episodes if episode.task_id in own],
        settings=settings,
        lineages={1: 0},
        lineage=1,
    )


OFFLOADED = ((), ("parameters",))


def train_sharded(
    family: str, ranks: Ranks, *, microbatch_tokens: int, offload: tuple[str, ...] = ()
) -> tuple[float, list[Tensor], int]:
    """Train one batch of a family's model, sharded and reduced in float64.

    Returns:
        Loss, whole gradients, and the reductions over ranks that they took.
    """
    model = make_random_model(family, attention_multiplier=0.1).double()
    policy = Policy(model, temperature=1.0)
    shard(policy, ranks.mesh, dtype=torch.float64, offload=offload)
    settings, kept = AlgorithmSettings(entropy_bonus=0.01), Kept(policy)
    microbatches = _microbatches(settings, ranks, microbatch_tokens)
    with (
        StayWide(),
        mock.patch.object(
            dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single
        ) as reductions,
    ):
        trained = train_batch(
            policy,
            cast("ScheduledOptimizer", kept),
            3,
            microbatches,
            settings=settings,
            ranks=ranks,
        )
    return trained.loss, kept.gradients, reductions.call_count


class Kept:
    """Stands in for AdamW: keeps whole gradients."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.gradients: list[Tensor] = []

    def step(self, step: int | None = None, *, loss: float = 0.0) -> StepOutcome:
        """Gather the gradients; every rank must call it."""
        gradients = [p.grad for _, p in sorted(self._policy.named_parameters())]
        self.gradients = [
            g.full_tensor() if isinstance(g, DTensor) else g for g in gradients if g is not None
        ]
        return StepOutcome(grad_norm=0.0, learning_rate=0.0, skipped=False)


def main(folder: Path) -> None:
    """Train every case, and let rank 0 write down what it found."""
    ranks = join("cpu", threads=1)
    found = [train(case, ranks, microbatch_tokens=24) for case in CASES]
    sharded = [
        train_sharded(family, ranks, microbatch_tokens=24, offload=OFFLOADED[number % 2])
        for number, family in enumerate(FAMILIES)
    ]
    with mock.patch.object(memory_rules, "SMALL_PART", 0.0):  # no room for whole gradients
        sharded.append(train_sharded(FAMILIES[0], ranks, microbatch_tokens=24))
    if ranks.is_first:
        torch.save(found, folder / "found.pt")
        torch.save(sharded, folder / "sharded.pt")
    ranks.barrier()
    ranks.destroy_process_group()
