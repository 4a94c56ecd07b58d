"""Batches: the plan of a sealed claim's episodes, and their microbatches on each rank.

Owns the plan (advantage, minibatch, rank and microbatch of each episode), its encoding for the
other ranks, and packing. Rank 0 plans, all ranks pack; both are pure functions, so a replayed claim
gives the same bytes.

Shapes: B episodes of a microbatch, T their tokens, N of these that are trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from buffer.record.episode import Episode
from configs.errors import RecordError
from configs.settings import AlgorithmSettings
from learner.algorithm.advantages import estimate
from learner.algorithm.aggregations import AGGREGATIONS, Counts
from learner.algorithm.group_statistics import Outcomes
from learner.algorithm.microbatch import Microbatch, empty_microbatch
from learner.algorithm.sequences import Sequences
from learner.model.sequence_cost import SequenceCost

from .dealing import deal
from .policy_lag import token_lags

BY_LENGTH = SequenceCost()


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One episode of a batch."""

    task_id: int
    rank: int
    """Rank that trains it."""
    advantage: float
    minibatch: int
    """Index of its optimizer step within an epoch, from 0."""
    microbatch: int
    """Index of its forward pass within the minibatch, from 0, the same on all ranks."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plan of batch `step`. Producer: rank 0. Consumer: all ranks."""

    step: int
    rows: tuple[PlanRow, ...]
    counts: tuple[Counts, ...]
    """Of each minibatch."""

    def task_ids_of(self, rank: int) -> list[int]:
        """List the tasks whose episodes a rank trains."""
        return [row.task_id for row in self.rows if row.rank == rank]

    def num_microbatches(self, minibatch: int) -> int:
        """Count the forward passes of a minibatch; every rank makes as many."""
        return 1 + max(row.microbatch for row in self.rows if row.minibatch == minibatch)

    def encode(self) -> bytes:
        """Encode as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> BatchPlan:
        """Decode what `encode` made."""
        return msgspec.msgpack.decode(encoded, type=cls)


def plan_batch(
    step: int,
    episodes: Sequence[Episode],
    *,
    ranks: int,
    settings: AlgorithmSettings,
    max_completion_tokens: int,
    microbatch_tokens: int,
    num_minibatches: int = 1,
    cost: SequenceCost = BY_LENGTH,
) -> BatchPlan:
    """Assign each episode an advantage, a minibatch, a rank and a microbatch.

    Minibatches consist of whole groups; their numbers of groups differ by at most one.

    Args:
        step: Of the batch.
        episodes: All of it.
        ranks: Number of ranks.
        settings: The advantage.
        max_completion_tokens: `run.max_completion_tokens`.
        microbatch_tokens: Most tokens of one forward pass.
        num_minibatches: Optimizer steps per epoch.
        cost: Of an episode, by which ranks and microbatches are balanced.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for row, episode in enumerate(episodes):
        groups[episode.group_id].append(row)
    minibatches: list[list[int]] = [[] for _ in range(num_minibatches)]
    for number, rows in enumerate(groups.values()):
        minibatches[number * num_minibatches // len(groups)] += rows

    advantages = estimate(_outcomes(episodes), settings)
    planned: dict[int, PlanRow] = {}
    for minibatch, rows in enumerate(minibatches):
        sizes = [
            (num_tokens(episodes[row]), int(episodes[row].completion.loss_mask.sum()))
            for row in rows
        ]
        places = deal(
            [tokens for tokens, _ in sizes],
            [cost(*size) for size in sizes],
            ranks=ranks,
            microbatch_tokens=microbatch_tokens,
        )
        for row, place in zip(rows, places, strict=True):
            planned[row] = PlanRow(
                task_id=episodes[row].task_id,
                rank=place.rank,
                advantage=float(advantages[row]),
                minibatch=minibatch,
                microbatch=place.microbatch,
            )
    return BatchPlan(
        step=step,
        rows=tuple(planned[row] for row in range(len(episodes))),
        counts=tuple(
            _count([episodes[row] for row in rows], max_completion_tokens) for rows in minibatches
        ),
    )


def _count(episodes: Sequence[Episode], max_completion_tokens: int) -> Counts:
    trained = [int(episode.completion.loss_mask.sum()) for episode in episodes]
    return Counts(
        tokens=sum(trained),
        episodes=sum(1 for tokens in trained if tokens),
        max_completion_tokens=max_completion_tokens,
    )


def _outcomes(episodes: Sequence[Episode]) -> Outcomes:
    group_ids = [episode.group_id for episode in episodes]
    return Outcomes(
        rewards_E=np.array([episode.reward for episode in episodes], dtype=np.float64),
        lengths_E=np.array([e.completion.loss_mask.sum() for e in episodes], dtype=np.float64),
        groups_E=np.unique(group_ids, return_inverse=True)[1],
    )


def num_tokens(episode: Episode) -> int:
    """Count prompt and completion tokens of an episode."""
    return len(episode.prompt_ids) + len(episode.completion.token_ids)


def pack(
    plan: BatchPlan,
    episodes: Sequence[Episode],
    *,
    settings: AlgorithmSettings,
    lineages: dict[int, int],
    lineage: int,
) -> list[Microbatch]:
    """Pack one rank's episodes of a planned batch into microbatches, as many as any other rank.

    Args:
        plan: The whole batch.
        episodes: This rank's share, any order.
        settings: The aggregation.
        lineages: lineage -> step it forked at.
        lineage: The learner's own.

    Raises:
        RecordError: An episode is not in the plan, or has no prompt to predict its first token.
    """
    planned = {row.task_id: row for row in plan.rows}
    for episode in episodes:
        if episode.task_id not in planned or not len(episode.prompt_ids):
            raise RecordError(
                f"episode {episode.task_id} must be in the plan of batch {plan.step} and have a "
                f"prompt, got {len(episode.prompt_ids)} prompt tokens"
            )
    microbatches = []
    for minibatch, counts in enumerate(plan.counts):
        own = [e for e in episodes if planned[e.task_id].minibatch == minibatch]
        # Attention takes equally long neighbours together.
        own.sort(key=lambda episode: (num_tokens(episode), episode.task_id))
        lengths_E = np.array([int(e.completion.loss_mask.sum()) for e in own], dtype=np.int64)
        weights_E = AGGREGATIONS[settings.aggregation](lengths_E, counts)
        for number in range(plan.num_microbatches(minibatch)):
            rows = [n for n, e in enumerate(own) if planned[e.task_id].microbatch == number]
            microbatches.append(
                _concatenate(
                    [own[row] for row in rows],
                    [planned[own[row].task_id] for row in rows],
                    [float(weights_E[row]) for row in rows],
                    [token_lags(own[row], plan.step, lineage, lineages) for row in rows],
                )
                if rows
                else empty_microbatch(minibatch)
            )
    return microbatches


def _concatenate(
    episodes: Sequence[Episode],
    plan_rows: Sequence[PlanRow],
    weights: Sequence[float],
    lags: Sequence[np.ndarray],
) -> Microbatch:
    masks = [episode.completion.loss_mask.astype(bool) for episode in episodes]
    trained_T = np.concatenate(
        [np.pad(mask, (len(e.prompt_ids), 0)) for e, mask in zip(episodes, masks, strict=True)]
    )
    repeats = [int(mask.sum()) for mask in masks]
    behaviour_logprobs_N = np.concatenate(
        [e.completion.behaviour_logprobs[mask] for e, mask in zip(episodes, masks, strict=True)]
    )
    advantages_B = np.array([row.advantage for row in plan_rows], dtype=np.float32)
    lags_N = np.concatenate([lag[mask] for lag, mask in zip(lags, masks, strict=True)])
    return Microbatch(
        sequences=Sequences.of(
            [np.concatenate([e.prompt_ids, e.completion.token_ids]) for e in episodes]
        ),
        indices_N=torch.from_numpy(np.flatnonzero(trained_T)),
        behaviour_logprobs_N=torch.from_numpy(behaviour_logprobs_N.astype(np.float32)),
        advantages_N=torch.from_numpy(np.repeat(advantages_B, repeats)),
        weights_N=torch.from_numpy(np.repeat(np.array(weights, dtype=np.float32), repeats)),
        lags_N=torch.from_numpy(lags_N.astype(np.int64)),
        episodes_N=torch.from_numpy(np.repeat(np.arange(len(episodes)), repeats)),
        rewards_B=torch.tensor([episode.reward for episode in episodes], dtype=torch.float32),
        minibatch=plan_rows[0].minibatch,
    )
