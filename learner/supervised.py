"""Supervised training: cross entropy of the trained tokens of rows, packed, on all ranks.

`nyala sft` and the supervised start of a small model both train by `train`. The loss of an
optimizer step is the mean over its trained tokens, those of all ranks and microbatches together:
packing and the number of ranks change neither loss nor gradient.

Owns the order of the rows and the arithmetic of a step; files, checkpoints and the end of a run lie
elsewhere.

Shapes: T tokens of a microbatch, N of these that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from buffer.record.demonstrations import DemonstratedRow, Demonstrations
from learner.algorithm.microbatch import Sequences
from learner.data.dealing import deal
from learner.model.policy import Policy, has_room, hold_gradients, release
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.profiling import phase
from learner.training.optimizer import ScheduledOptimizer, StepOutcome

# --------------------------------------------------------------------------------------------------
# The rows of each optimizer step: shuffled passes over all rows, one behind the other.
#
# A pure function of seed and step, so that a resumed run needs no state of it.

PASSES_KEPT = 2  # a step may end one pass and begin the next


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which rows each optimizer step trains.

    Example:
        >>> order = RowOrder(num_rows=4, batch=3, total=8, seed=0)
        >>> order.steps, [len(order.rows_of(step)) for step in (1, 2, 3)]
        (3, [3, 3, 2])
        >>> sorted(order.rows_of(1) + order.rows_of(2)[:1])
        [0, 1, 2, 3]
    """

    num_rows: int
    batch: int
    """Rows of an optimizer step."""
    total: int
    """Rows of all steps together, those that are trained again included."""
    seed: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps; the last one may have fewer rows."""
        return math.ceil(self.total / self.batch)

    def rows_of(self, step: int) -> list[int]:
        """List the rows of a step, the first being 1."""
        places = range((step - 1) * self.batch, min(step * self.batch, self.total))
        return [
            int(_order_of_pass(self.seed, place // self.num_rows, self.num_rows)[at])
            for place in places
            for at in (place % self.num_rows,)
        ]


@lru_cache(PASSES_KEPT)
def _order_of_pass(seed: int, number: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, number)).permutation(num_rows)


# --------------------------------------------------------------------------------------------------
# Rows in microbatches.


class PackedRows(NamedTuple):
    """The tokens of one forward pass."""

    sequences: Sequences
    indices_N: Tensor
    """Place of each trained token among the T. Shape [N], int64."""


def pack_rows(
    rows: Sequence[DemonstratedRow],
    cost: SequenceCost,
    *,
    microbatch_tokens: int,
    ranks: int = 1,
    rank: int = 0,
) -> list[PackedRows]:
    """Pack one rank's share of rows into microbatches, as many as any other rank.

    Args:
        rows: The rows of all ranks.
        cost: Cost of a row, by which ranks are balanced.
        microbatch_tokens: Most tokens of a microbatch; a longer row has one of its own.
        ranks: Ranks with different microbatches.
        rank: Number of this one among them.
    """
    lengths = [len(row.token_ids) for row in rows]
    costs = [cost(len(row.token_ids), int(row.is_trained.sum())) for row in rows]
    places = deal(lengths, costs, ranks=ranks, microbatch_tokens=microbatch_tokens)
    packed = []
    for number in range(1 + max(place.microbatch for place in places)):
        mine = [row for row, place in enumerate(places) if place == (rank, number)]
        mine.sort(key=lengths.__getitem__)  # attention takes equally long neighbours together
        packed.append(_join([rows[row] for row in mine]))
    return packed


def _join(rows: Sequence[DemonstratedRow]) -> PackedRows:
    if not rows:  # to take part in every collective of FSDP2
        return PackedRows(Sequences.from_token_ids([[0]]), torch.zeros(0, dtype=torch.int64))
    is_trained_T = np.concatenate([row.is_trained for row in rows])
    sequences = Sequences.from_token_ids([row.token_ids for row in rows])
    return PackedRows(sequences, torch.from_numpy(np.flatnonzero(is_trained_T)))


# --------------------------------------------------------------------------------------------------
# Optimizer steps and the loss of held-out rows.


class SupervisedStep(NamedTuple):
    """Figures of an optimizer step, of all ranks together."""

    step: int
    loss: float
    """Mean cross entropy of its trained tokens, nats."""
    outcome: StepOutcome
    rows: int
    tokens: int
    """Tokens of its rows, trained or not."""
    trained_tokens: int

    def as_line(self) -> dict[str, float]:
        """Return the figures by their names in `metrics.jsonl`."""
        return {
            "step": self.step,
            "sft_loss": self.loss,
            "grad_norm": self.outcome.grad_norm,
            "learning_rate": self.outcome.learning_rate,
            "skipped_steps": int(self.outcome.skipped),
            "sft_rows": self.rows,
            "sft_tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
        }


@dataclass(frozen=True, slots=True)
class SupervisedTraining:
    """Training of a policy on rows: what all of its steps share.

    Every rank calls the same methods in the same order. Without `ranks` this process is alone.
    """

    policy: Policy
    optimizer: ScheduledOptimizer
    rows: Demonstrations
    order: RowOrder
    microbatch_tokens: Callable[[int], int]
    """Most tokens of a microbatch in a step."""
    ranks: Ranks | None = None

    def train(self, *, done: int = 0) -> Iterator[SupervisedStep]:
        """Take the optimizer steps behind the first `done`, and yield the figures of each."""
        reduces_once = self.ranks is not None and has_room([self.policy], self.ranks)
        for step in range(done + 1, self.order.steps + 1):
            rows = [self.rows[row] for row in self.order.rows_of(step)]
            yield self._step(step, rows, reduces_once=reduces_once)

    def _step(
        self, step: int, rows: Sequence[DemonstratedRow], *, reduces_once: bool
    ) -> SupervisedStep:
        trained = sum(int(row.is_trained.sum()) for row in rows)
        packed = self._pack(rows, step)
        losses = []
        for number, (sequences, indices_N) in enumerate(packed, start=1):
            hold_gradients(self.policy, keeps_whole=reduces_once and number < len(packed))
            with phase("forward"):
                scores = self.policy(
                    sequences,
                    indices_N,
                    temperature=1.0,
                    loss_of=lambda _places, logprobs, _entropies: -logprobs.sum() / trained,
                )
            with phase("backward"):
                scores.loss.backward()
            losses.append(-scores.logprobs_N.detach().double().sum() / trained)
        loss = self._sum(torch.stack(losses).sum())
        outcome = self.optimizer.step(step, loss=loss)
        tokens = sum(len(row.token_ids) for row in rows)
        return SupervisedStep(step, loss, outcome, len(rows), tokens, trained)

    @torch.no_grad()
    def held_out_loss(self, step: int) -> float | None:
        """Return the mean cross entropy of the rows that are set aside, nats; None without any."""
        rows = [self.rows[row] for row in range(self.rows.num_trained, len(self.rows))]
        if not rows:
            return None
        total = torch.zeros((), dtype=torch.float64)
        for sequences, indices_N in self._pack(rows, step):
            scores = self.policy(sequences, indices_N, temperature=1.0)
            release(self.policy)
            total -= scores.logprobs_N.double().sum().cpu()
        return self._sum(total) / sum(int(row.is_trained.sum()) for row in rows)

    def _pack(self, rows: Sequence[DemonstratedRow], step: int) -> list[PackedRows]:
        with phase("pack"):
            cost = SequenceCost.from_config(self.policy.causal_lm.config.to_dict())
            packed = pack_rows(
                rows,
                cost,
                microbatch_tokens=self.microbatch_tokens(step),
                ranks=1 if self.ranks is None else self.ranks.data_size,
                rank=0 if self.ranks is None else self.ranks.data_rank,
            )
            device = self.policy.device
            return [
                PackedRows(sequences.to(device), indices_N.to(device))
                for sequences, indices_N in packed
            ]

    def _sum(self, value: Tensor) -> float:
        return float(value if self.ranks is None else self.ranks.sum(value))
