"""Microbatches: the tensors of one forward pass, and sums over the tokens of their episodes.

An episode is never cut, so a microbatch has all tokens of each of its episodes.

Shapes: B episodes, T tokens of all of them (prompts and completions), N of these that are trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Sequences of tokens one after another, without pads: the input of a forward pass.
#
# A sequence may continue one before it, as completions continue a prompt that is there once, and
# branches a part of their episode: its positions count on, and it sees what that one sees, and
# itself. No other sequence is seen.
#
# Shapes: S sequences, T tokens of all of them.


@dataclass(frozen=True, slots=True, eq=False)
class AttendedTokens:
    """The tokens that each sequence sees: those that the one it continues sees, then its own."""

    places: Tensor
    """Among the T, one sequence after another. int64."""
    bounds: Tensor
    """Begin of each sequence in `places`, and their number. Shape [S + 1], int32."""
    lengths: tuple[int, ...]
    """Tokens that each sequence sees, on the host."""


class UniformSequences(NamedTuple):
    """Neighbouring sequences that are equally long and see equally many tokens."""

    number: int
    length: int
    seen: int


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The tokens of S sequences, where each begins, and what it continues."""

    token_ids_T: Tensor
    """Shape [T], int64."""
    positions_T: Tensor
    """Place of each token behind the first that its sequence sees, from 0. Shape [T], int64."""
    before_T: Tensor
    """The token before each one, whose state predicts it, among the T; the first that a sequence
    sees has none, and names itself. Shape [T], int64."""
    bounds: Tensor
    """Begin of each sequence, and T. Shape [S + 1], int32."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host: no kernel waits for them."""
    seen: AttendedTokens | None
    """The tokens that each sequence sees; None = each sees only itself."""

    @classmethod
    def from_token_ids(
        cls, sequences: Sequence[npt.ArrayLike], *, prefixes: Sequence[int | None] | None = None
    ) -> Sequences:
        """Put sequences behind each other; there is at least one, and none is empty.

        Args:
            sequences: Token ids of each sequence.
            prefixes: The number of the earlier sequence that each continues; None = it begins.
        """
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        lengths = tuple(len(array) for array in arrays)
        assert lengths and all(lengths)
        bounds = [0, *itertools.accumulate(lengths)]
        seen: list[np.ndarray] = []
        for (begin, end), prefix in zip(
            itertools.pairwise(bounds), prefixes or [None] * len(lengths), strict=True
        ):
            places = np.arange(begin, end)
            seen.append(places if prefix is None else np.concatenate([seen[prefix], places]))
        before = [np.concatenate([places[:1], places[:-1]]) for places in seen]
        is_alone = all(len(places) == length for places, length in zip(seen, lengths, strict=True))
        return cls(
            token_ids_T=torch.from_numpy(np.concatenate(arrays)),
            positions_T=_join([np.arange(len(places)) for places in seen], lengths),
            before_T=_join(before, lengths),
            bounds=torch.tensor(bounds, dtype=torch.int32),
            lengths=lengths,
            seen=None if is_alone else _attended_tokens(seen),
        )

    def to(self, device: torch.device) -> Sequences:
        """Copy the tensors to a device."""
        seen = self.seen
        return Sequences(
            self.token_ids_T.to(device),
            self.positions_T.to(device),
            self.before_T.to(device),
            self.bounds.to(device),
            self.lengths,
            seen and AttendedTokens(seen.places.to(device), seen.bounds.to(device), seen.lengths),
        )

    @property
    def seen_lengths(self) -> tuple[int, ...]:
        """Tokens that each sequence sees, its own included."""
        return self.lengths if self.seen is None else self.seen.lengths

    def equal_runs(self) -> Iterator[UniformSequences]:
        """Neighbouring sequences that attention can take together."""
        sizes = zip(self.lengths, self.seen_lengths, strict=True)
        for size, run in itertools.groupby(sizes):
            yield UniformSequences(len(list(run)), *size)


def _join(seen: Sequence[np.ndarray], lengths: Sequence[int]) -> Tensor:
    """Join the values of each sequence's own tokens, without those of its prefix. Shape [T]."""
    parts = [values[-length:] for values, length in zip(seen, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _attended_tokens(seen: Sequence[np.ndarray]) -> AttendedTokens:
    lengths = tuple(len(places) for places in seen)
    bounds = [0, *itertools.accumulate(lengths)]
    return AttendedTokens(
        torch.from_numpy(np.concatenate(seen)), torch.tensor(bounds, dtype=torch.int32), lengths
    )


# --------------------------------------------------------------------------------------------------
# Microbatches: the tensors of one forward pass, and sums over the tokens of their episodes.


@dataclass(frozen=True, slots=True, eq=False)
class TeacherInput:
    """The episodes of a microbatch that one teacher scores, behind the prompts that it reads."""

    sequences: Sequences
    indices_M: Tensor
    """Place of each trained token among those of `sequences`. Shape [M], int64."""
    places_M: Tensor
    """Number of each of these tokens among the N of the microbatch. Shape [M], int64."""

    @classmethod
    def empty(cls) -> TeacherInput:
        """Make the input of a rank that has no episode for a teacher: it runs all the same."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(Sequences.from_token_ids([[0]]), nothing, nothing)


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Tensors of one forward pass. Flat arrays hold trained tokens only."""

    sequences: Sequences
    """Prompts with completions; a prompt that several episodes have, or a part of a completion from
    which others branch, is a sequence of its own, which the others continue."""
    indices_N: Tensor
    """Place of each trained token among the T. Shape [N], int64."""
    behaviour_logprobs_N: Tensor
    """log mu, nats. Shape [N], float32."""
    advantages_N: Tensor
    """Shape [N], float32."""
    weights_N: Tensor
    """Weight of each token in the loss of the batch. Shape [N], float32."""
    lags_N: Tensor
    """Policy lag of each token, batches. Shape [N], int64."""
    episodes_N: Tensor
    """Number of each token's episode, ascending: 0 to B - 1. Shape [N], int64."""
    rewards_B: Tensor
    """Reward of each episode. Shape [B], float32."""
    oldest_lags_B: Tensor
    """Policy lag of each episode's oldest token, trained or not, batches. Shape [B], int64."""
    places_N: Tensor
    """Place of each token among all trained tokens of its rank in the batch, by task id. It is the
    same in any packing. Shape [N], int64."""
    minibatch: int
    """Index of its optimizer step within an epoch, from 0."""
    trajectories_N: Tensor | None = None
    """Number of each token's trajectory, where an episode with branches has several; None = each
    episode is one. Shape [N], int64."""
    teacher_inputs: tuple[TeacherInput, ...] = ()
    """What each teacher in the learner scores; stays on the host until it does."""
    log_teacher_N: Tensor | None = None
    """Log-probs under a teacher that actors have scored with, nats; NaN where a token has none.
    Shape [N], float32."""

    def to(self, device: torch.device) -> Microbatch:
        """Copy the tensors to a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in values.items()
            if isinstance(value, Tensor | Sequences)
        }
        return replace(self, **moved)


class TrajectoryOrder(NamedTuple):
    """The trained tokens of a microbatch, one trajectory behind the other."""

    order_N: Tensor
    """Number of each of these tokens among the N. Shape [N], int64."""
    is_last_N: Tensor
    """Whether its trajectory ends with it. Shape [N], bool."""

    @classmethod
    def from_microbatch(cls, microbatch: Microbatch) -> TrajectoryOrder:
        """Order the tokens of a microbatch, of which there is at least one."""
        numbers_N = microbatch.trajectories_N
        if numbers_N is None:
            numbers_N = microbatch.episodes_N
        ordered_N, order_N = numbers_N.sort(stable=True)
        is_last_N = torch.ones_like(ordered_N, dtype=torch.bool)
        is_last_N[:-1] = ordered_N[1:] != ordered_N[:-1]
        return cls(order_N, is_last_N)

    def restore(self, values_N: Tensor) -> Tensor:
        """Bring values of the ordered tokens into the order of the microbatch. Shape [N]."""
        return torch.empty_like(values_N).index_copy_(0, self.order_N, values_N)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMicrobatch:
    """A microbatch on the learner's device, with the constants of a batch's optimizer steps."""

    microbatch: Microbatch
    log_prox_N: Tensor | None = None
    """Log-probs under the policy at the beginning of the batch, nats. Shape [N]."""
    log_ref_N: Tensor | None = None
    """Log-probs under the frozen reference policy, nats. Shape [N]."""
    log_teacher_N: Tensor | None = None
    """Log-probs under each token's teacher, nats; NaN where it has none. Shape [N]."""
    values_N: Tensor | None = None
    """The critic's values. Shape [N]."""
    targets_N: Tensor | None = None
    """Value targets of the critic. Shape [N]."""
    log_ratio_bound: float = math.inf
    """M2PO: largest |log(pi/mu)| that stays, set before each optimizer step; nats."""

    def select_tokens(self, places: Tensor | slice) -> PreparedMicrobatch:
        """Keep only some of the N tokens; values of sequences and episodes stay as they are."""
        microbatch = replace(self.microbatch, **_select_fields(self.microbatch, places))
        return replace(self, microbatch=microbatch, **_select_fields(self, places))


def _select_fields(
    owner: Microbatch | PreparedMicrobatch, places: Tensor | slice
) -> dict[str, Any]:
    values = {f.name: getattr(owner, f.name) for f in fields(owner) if f.name.endswith("_N")}
    return {name: None if value is None else value[places] for name, value in values.items()}


def empty_microbatch(minibatch: int = 0, *, teachers: int = 0) -> Microbatch:
    """Make a microbatch that has no trained token.

    A rank with fewer microbatches than another adds these, to take part in every collective of
    FSDP2.

    Args:
        minibatch: Index of its optimizer step within an epoch, from 0.
        teachers: Number of teachers in the learner.
    """
    nothing = torch.zeros(0)
    return Microbatch(
        sequences=Sequences.from_token_ids([[0]]),
        indices_N=nothing.long(),
        behaviour_logprobs_N=nothing,
        advantages_N=nothing,
        weights_N=nothing,
        lags_N=nothing.long(),
        episodes_N=nothing.long(),
        rewards_B=torch.zeros(1),
        oldest_lags_B=torch.zeros(1, dtype=torch.int64),
        places_N=nothing.long(),
        minibatch=minibatch,
        teacher_inputs=(TeacherInput.empty(),) * teachers,
    )


def by_place(microbatches: Sequence[Microbatch], values: Sequence[Tensor]) -> Tensor:
    """Put values of the tokens of a rank's microbatches at their places in the batch.

    Args:
        microbatches: All microbatches of a rank, in one packing.
        values: Values of each microbatch's tokens. Shapes [N].

    Returns:
        One value for each trained token: those of a microbatch in another packing are at its
        `places_N`.
    """
    joined = torch.cat(list(values))
    places = torch.cat([microbatch.places_N for microbatch in microbatches])
    return torch.empty_like(joined).index_copy_(0, places, joined)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Token-to-episode index of a microbatch."""

    episodes_N: Tensor
    """Number of each token's episode, ascending. Shape [N], int64."""
    num_episodes: int
    """B; some may have no trained token."""

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum over each token's episode. Shape [N]."""
        sums_B = values_N.new_zeros(self.num_episodes).index_add(0, self.episodes_N, values_N)
        return sums_B[self.episodes_N]

    def mean(self, values_N: Tensor) -> Tensor:
        """Average over the tokens of each token's episode. Shape [N]."""
        return self.sum(values_N) / self.sum(values_N.new_ones(values_N.shape))

    def any(self, flags_N: Tensor) -> Tensor:
        """Mark every token of an episode in which one is marked. Shape [N], bool."""
        return self.sum(flags_N.float()) > 0
