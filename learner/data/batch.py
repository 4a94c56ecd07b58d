"""Batches: the plan of a sealed claim's episodes, and their microbatches on each rank.

Owns the plan (advantage, minibatch, rank and microbatch of each episode), its encoding for the
other ranks, and packing, which puts a prompt that several episodes of a microbatch have there once.
Rank 0 plans, all ranks pack; both are pure functions, so a replayed claim gives the same bytes.

Shapes: B episodes of a microbatch, T their tokens, N of these that are trained.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from buffer.operations.values import StaleMask
from buffer.record.episode import Episode, Int32, stretches, trajectories
from configs.errors import RecordError
from configs.settings import AlgorithmSettings
from learner.algorithm.advantages import BatchRewards, estimate
from learner.algorithm.aggregations import AGGREGATIONS, MinibatchSize
from learner.algorithm.microbatch import (
    Microbatch,
    Sequences,
    TeacherInput,
    empty_microbatch,
)
from learner.model.sequence_cost import SequenceCost

from .dealing import SequencePlacement, Size, deal_episodes
from .policy_lag import token_lags

BY_LENGTH = SequenceCost()

TeacherPrompt = Callable[[Episode], Int32]
"""Returns the tokens that a teacher reads before an episode's completion; at least one."""


def prompt_of_episode(episode: Episode) -> Int32:
    """Return the prompt that the policy had."""
    return episode.prompt_ids


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One episode of a batch."""

    task_id: int
    rank: int
    """Rank that trains it, of those with different microbatches."""
    advantage: float
    minibatch: int
    """Index of its optimizer step within an epoch, from 0."""
    microbatch: int
    """Index of its forward pass within the minibatch, from 0, the same on all ranks."""
    teacher: int | None = None
    """Number of its teacher among `algorithm.teachers`."""
    critic_microbatch: int = 0
    """The same of a critic that has a token budget of its own."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plan of batch `step`. Producer: rank 0. Consumer: all ranks."""

    step: int
    rows: tuple[PlanRow, ...]
    """Episodes with a trained token; the others have no part in a forward pass."""
    counts: tuple[MinibatchSize, ...]
    """Counts of each minibatch."""
    mask: StaleMask | None = None
    """The mask that the batch was sealed with."""
    reused: tuple[int, ...] = ()
    """Groups that are trained again."""

    def task_ids_of(self, rank: int) -> list[int]:
        """List the tasks whose episodes a rank trains."""
        return [row.task_id for row in self.rows if row.rank == rank]

    def num_microbatches(self, minibatch: int, *, of_critic: bool = False) -> int:
        """Count the forward passes of a minibatch; every rank makes as many."""
        rows = (row for row in self.rows if row.minibatch == minibatch)
        numbers = (row.critic_microbatch if of_critic else row.microbatch for row in rows)
        return 1 + max(numbers, default=0)

    def encode(self) -> bytes:
        """Encode the plan as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> BatchPlan:
        """Decode a plan from msgpack."""
        return msgspec.msgpack.decode(encoded, type=cls)


def plan_batch(
    step: int,
    episodes: Sequence[Episode],
    *,
    ranks: int,
    settings: AlgorithmSettings,
    max_completion_tokens: int,
    microbatch_tokens: int,
    critic_tokens: int | None = None,
    num_minibatches: int = 1,
    cost: SequenceCost = BY_LENGTH,
    environment_of: Callable[[int], str] = lambda _: "",
) -> BatchPlan:
    """Assign each episode with a trained token an advantage, a minibatch, a rank and a microbatch.

    Minibatches consist of whole groups; their numbers of groups differ by at most one. Advantages
    are computed from the rewards of all episodes.

    Args:
        step: Number of the batch.
        episodes: All episodes of the batch.
        ranks: Number of ranks.
        settings: Settings of the advantage.
        max_completion_tokens: `run.max_completion_tokens`.
        microbatch_tokens: Most tokens of one forward pass; a longer episode has a pass of its own.
        critic_tokens: The same of a critic that has a token budget of its own; else None.
        num_minibatches: Optimizer steps per epoch.
        cost: Cost of an episode, by which ranks and microbatches are balanced.
        environment_of: Names the environment of a group, which may decide on its teacher.
    """
    minibatches = _cut(episodes, num_minibatches)
    advantages = estimate(_outcomes(episodes), settings)
    planned: dict[int, PlanRow] = {}
    for minibatch, members in enumerate(minibatches):
        rows = [row for row in members if episodes[row].completion.num_trained]
        sizes = [_size(episodes[row]) for row in rows]
        places = deal_episodes(sizes, cost, ranks=ranks, microbatch_tokens=microbatch_tokens)
        of_critic = _critic_microbatches(
            [episodes[row] for row in rows], places, critic_tokens, cost
        )
        for row, place, critic_microbatch in zip(rows, places, of_critic, strict=True):
            planned[row] = PlanRow(
                task_id=episodes[row].task_id,
                rank=place.rank,
                advantage=float(advantages[row]),
                minibatch=minibatch,
                microbatch=place.microbatch,
                teacher=settings.teacher_of(environment_of(episodes[row].group_id)),
                critic_microbatch=critic_microbatch,
            )
    return BatchPlan(
        step=step,
        rows=tuple(planned[row] for row in sorted(planned)),
        counts=tuple(
            _count([episodes[row] for row in rows], max_completion_tokens) for rows in minibatches
        ),
    )


def _cut(episodes: Sequence[Episode], num_minibatches: int) -> list[list[int]]:
    """Cut a batch into minibatches of whole groups: the rows of each."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row, episode in enumerate(episodes):
        groups[episode.group_id].append(row)
    minibatches: list[list[int]] = [[] for _ in range(num_minibatches)]
    for number, rows in enumerate(groups.values()):
        minibatches[number * num_minibatches // len(groups)] += rows
    return minibatches


def _critic_microbatches(
    episodes: Sequence[Episode],
    places: Sequence[SequencePlacement],
    critic_tokens: int | None,
    cost: SequenceCost,
) -> list[int]:
    """Deal the episodes of each rank to the critic's microbatches; 0 without a budget of its own.

    An episode stays on the rank that trains the policy with it, where its advantages are computed.
    """
    numbers = [0] * len(episodes)
    if critic_tokens is None:
        return numbers
    for rank in {place.rank for place in places}:
        rows = [row for row, place in enumerate(places) if place.rank == rank]
        sizes = [_size(episodes[row]) for row in rows]
        dealt = deal_episodes(sizes, cost, ranks=1, microbatch_tokens=critic_tokens)
        for row, place in zip(rows, dealt, strict=True):
            numbers[row] = place.microbatch
    return numbers


def _count(episodes: Sequence[Episode], max_completion_tokens: int) -> MinibatchSize:
    trained = [episode.completion.num_trained for episode in episodes]
    return MinibatchSize(
        tokens=sum(trained),
        episodes=sum(1 for tokens in trained if tokens),
        max_completion_tokens=max_completion_tokens,
    )


def _outcomes(episodes: Sequence[Episode]) -> BatchRewards:
    group_ids = [episode.group_id for episode in episodes]
    return BatchRewards(
        rewards_E=np.array([episode.reward for episode in episodes], dtype=np.float64),
        lengths_E=np.array([e.completion.num_trained for e in episodes], dtype=np.float64),
        groups_E=np.unique(group_ids, return_inverse=True)[1],
    )


def _size(episode: Episode) -> Size:
    return Size(
        prompt=_prompt(episode),
        prompt_tokens=len(episode.prompt_ids),
        tokens=len(episode.completion.token_ids),
        scored=episode.completion.num_trained,
    )


def _prompt(episode: Episode) -> bytes:
    return episode.prompt_ids.astype(np.int32).tobytes()


def pack(
    plan: BatchPlan,
    episodes: Sequence[Episode],
    *,
    settings: AlgorithmSettings,
    lineages: dict[int, int],
    lineage: int,
    teacher_prompt: TeacherPrompt = prompt_of_episode,
    of_critic: bool = False,
) -> list[Microbatch]:
    """Pack one rank's episodes of a planned batch into microbatches, as many as any other rank.

    Args:
        plan: The whole batch.
        episodes: This rank's share, any order.
        settings: Settings of the aggregation and of teachers.
        lineages: lineage -> step it forked at.
        lineage: Lineage of the learner.
        teacher_prompt: What teachers in the learner read before a completion.
        of_critic: Pack the microbatches of a critic that has a token budget of its own.

    Raises:
        RecordError: An episode is not in the plan, has no prompt to predict its first token, or has
            not been scored by a teacher that actors have.
    """
    planned = {row.task_id: row for row in plan.rows}
    for episode in episodes:
        if episode.task_id not in planned or not len(episode.prompt_ids):
            raise RecordError(
                f"episode {episode.task_id} must be in the plan of batch {plan.step} and have a "
                f"prompt, got one of {len(episode.prompt_ids)} prompt tokens; pack the episodes "
                "that were planned"
            )
    is_taught_here = settings.teacher_in == "learner" and not of_critic
    teachers = len(settings.teachers) if is_taught_here else 0
    episodes = sorted(episodes, key=lambda episode: episode.task_id)
    ends = itertools.accumulate((e.completion.num_trained for e in episodes), initial=0)
    first = {episode.task_id: place for episode, place in zip(episodes, ends, strict=False)}
    microbatches = []
    for minibatch, counts in enumerate(plan.counts):
        share = [e for e in episodes if planned[e.task_id].minibatch == minibatch]
        lengths_E = np.array([e.completion.num_trained for e in share], dtype=np.int64)
        weights_E = AGGREGATIONS[settings.aggregation](lengths_E, counts)
        rows = [
            _Row(
                e,
                planned[e.task_id],
                float(weight),
                token_lags(e, plan.step, lineage, lineages),
                first[e.task_id],
            )
            for e, weight in zip(share, weights_E, strict=True)
        ]
        for number in range(plan.num_microbatches(minibatch, of_critic=of_critic)):
            members = [row for row in rows if row.microbatch(of_critic=of_critic) == number]
            if members:
                microbatches.append(_microbatch(members, settings, teachers, teacher_prompt))
            else:
                microbatches.append(empty_microbatch(minibatch, teachers=teachers))
    return microbatches


def _microbatch(
    members: Sequence[_Row], settings: AlgorithmSettings, teachers: int, prompt_of: TeacherPrompt
) -> Microbatch:
    """Lay out the episodes of a microbatch, for the policy and for each teacher in the learner."""
    layout = _arrange(members)
    return replace(
        _concatenate(layout),
        teacher_inputs=tuple(
            _teacher_input(layout.rows, teacher, prompt_of) for teacher in range(teachers)
        ),
        log_teacher_N=None if settings.teacher_in == "learner" else _scores_of_actors(layout.rows),
    )


class _Row(NamedTuple):
    """An episode with its plan, weight, lags, and the place of its first trained token."""

    episode: Episode
    planned: PlanRow
    weight: float
    lags: np.ndarray
    first: int

    def microbatch(self, *, of_critic: bool) -> int:
        return self.planned.critic_microbatch if of_critic else self.planned.microbatch


class _Piece(NamedTuple):
    """Tokens of one sequence: an episode, a prompt of several, or a stretch of a completion."""

    token_ids: np.ndarray
    row: int | None
    """Number of the episode that it is of; None for a prompt."""
    prefix: int | None = None
    """Number of the piece that it continues."""


def _lay_out(episodes: Sequence[Episode]) -> list[_Piece]:
    """Cut a microbatch into pieces: what continues nothing, then completions of shared prompts.

    Attention takes neighbours of one size together. A completion with branches is cut where they
    begin and where they leave their parent: each token is there once, behind its path. Its pieces
    stay together, in the order of the log.
    """
    prompts = [_prompt(episode) for episode in episodes]
    uses = Counter(prompts)
    uses.update(_prompt(episode) for episode in episodes if episode.completion.branches)
    first = {
        prompt: _Piece(episode.prompt_ids, None)
        if uses[prompt] > 1
        else _Piece(np.concatenate([episode.prompt_ids, episode.completion.token_ids]), row)
        for row, (prompt, episode) in enumerate(zip(prompts, episodes, strict=True))
    }
    in_order = sorted(first, key=lambda prompt: len(first[prompt].token_ids))
    number_of = {prompt: number for number, prompt in enumerate(in_order)}
    sharing = [row for row, prompt in enumerate(prompts) if uses[prompt] > 1]
    sharing.sort(key=lambda row: (len(prompts[row]), len(episodes[row].completion.token_ids)))
    pieces = [first[prompt] for prompt in in_order]
    for row in sharing:
        completion = episodes[row].completion
        ending: dict[int | None, int | None] = {0: number_of[prompts[row]], None: None}
        for start, end, parent in stretches(completion.branches, len(completion.token_ids)):
            pieces.append(_Piece(completion.token_ids[start:end], row, ending[parent]))
            ending[end] = len(pieces) - 1
    return pieces


class _Layout(NamedTuple):
    """The tokens of a microbatch."""

    sequences: Sequences
    indices_N: torch.Tensor
    """Place of each trained token. Shape [N], int64."""
    rows: list[_Row]
    """The episodes, in the order of their tokens."""


def _arrange(rows: Sequence[_Row]) -> _Layout:
    """Lay the tokens of a microbatch out."""
    pieces = _lay_out([row.episode for row in rows])
    trained, in_order = [], []
    for number, members in itertools.groupby(pieces, key=lambda piece: piece.row):
        is_trained = np.zeros(sum(len(piece.token_ids) for piece in members), dtype=bool)
        if number is not None:
            mask = rows[number].episode.completion.loss_mask
            is_trained[len(is_trained) - len(mask) :] = mask
            in_order.append(rows[number])
        trained.append(is_trained)
    return _Layout(
        sequences=Sequences.from_token_ids(
            [piece.token_ids for piece in pieces], prefixes=[piece.prefix for piece in pieces]
        ),
        indices_N=torch.from_numpy(np.flatnonzero(np.concatenate(trained))),
        rows=in_order,
    )


def _concatenate(layout: _Layout) -> Microbatch:
    rows = layout.rows
    masks = [row.episode.completion.loss_mask.astype(bool) for row in rows]
    repeats = [row.episode.completion.num_trained for row in rows]
    behaviour_logprobs_N = np.concatenate(
        [
            row.episode.completion.behaviour_logprobs[mask]
            for row, mask in zip(rows, masks, strict=True)
        ]
    )
    advantages_B = np.array([row.planned.advantage for row in rows], dtype=np.float32)
    weights_B = np.array([row.weight for row in rows], dtype=np.float32)
    lags_N = np.concatenate([row.lags[mask] for row, mask in zip(rows, masks, strict=True)])
    firsts_N = np.repeat([row.first for row in rows], repeats)
    within_N = np.concatenate([np.arange(number) for number in repeats])
    return Microbatch(
        sequences=layout.sequences,
        indices_N=layout.indices_N,
        behaviour_logprobs_N=torch.from_numpy(behaviour_logprobs_N.astype(np.float32)),
        advantages_N=torch.from_numpy(np.repeat(advantages_B, repeats)),
        weights_N=torch.from_numpy(np.repeat(weights_B, repeats)),
        lags_N=torch.from_numpy(lags_N.astype(np.int64)),
        episodes_N=torch.from_numpy(np.repeat(np.arange(len(rows)), repeats)),
        rewards_B=torch.tensor([row.episode.reward for row in rows], dtype=torch.float32),
        oldest_lags_B=torch.tensor([row.lags.max(initial=0) for row in rows], dtype=torch.int64),
        places_N=torch.from_numpy(firsts_N + within_N),
        minibatch=rows[0].planned.minibatch,
        trajectories_N=_trajectories(rows, masks),
    )


def _trajectories(rows: Sequence[_Row], masks: Sequence[np.ndarray]) -> torch.Tensor | None:
    """Number the trajectories of trained tokens; None where each episode is one. Shape [N]."""
    completions = [row.episode.completion for row in rows]
    if not any(completion.branches for completion in completions):
        return None
    numbers, first = [], 0
    for completion, mask in zip(completions, masks, strict=True):
        numbers_T = np.array(trajectories(completion.branches, len(mask))) + first
        numbers.append(numbers_T[mask])
        first = int(numbers_T.max()) + 1
    return torch.from_numpy(np.concatenate(numbers))


def _teacher_input(rows: Sequence[_Row], teacher: int, prompt_of: TeacherPrompt) -> TeacherInput:
    """Lay out the episodes of one teacher, behind the prompts that it reads.

    Args:
        rows: Episodes of the microbatch, in the order of their tokens.
        teacher: Number of the teacher.
        prompt_of: Returns the prompt that it reads.
    """
    ends = np.cumsum([row.episode.completion.num_trained for row in rows])
    end_of = {row.episode.task_id: int(end) for row, end in zip(rows, ends, strict=True)}
    members = [
        row._replace(episode=replace(row.episode, prompt_ids=prompt_of(row.episode)))
        for row in rows
        if row.planned.teacher == teacher
    ]
    if not members:
        return TeacherInput.empty()
    layout = _arrange(members)
    places = [
        np.arange(end_of[episode.task_id] - episode.completion.num_trained, end_of[episode.task_id])
        for episode in (row.episode for row in layout.rows)
    ]
    return TeacherInput(
        layout.sequences, layout.indices_N, torch.from_numpy(np.concatenate(places))
    )


def _scores_of_actors(rows: Sequence[_Row]) -> torch.Tensor:
    """Join the log-probs under teachers that actors have; NaN without a teacher. Shape [N]."""
    scores = []
    for row in rows:
        completion = row.episode.completion
        if row.planned.teacher is None:
            scores.append(np.full(completion.num_trained, np.nan, dtype=np.float32))
            continue
        if completion.teacher_logprobs is None:
            raise RecordError(
                f"episode {row.episode.task_id} must have teacher_logprobs where "
                "algorithm.teacher_in is actor, got none; start an actor that scores for its "
                "teacher"
            )
        scores.append(completion.teacher_logprobs[completion.loss_mask.astype(bool)])
    return torch.from_numpy(np.concatenate(scores))
