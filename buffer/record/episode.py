"""The episode record, which an actor makes and the learner trains on.

Producer: `actors` (whole records, and chunks of unfinished ones). Consumer: `learner`.
Owns the record's parts; `codec.py` turns them into bytes. Loads without redis and torch.

The tokens of a completion are a log: they are only ever appended. Without branches each follows
the one before it, and the first follows the prompt. From the start of a branch on they follow an
earlier token, as after a rewritten history, or none, as the prompt of a sub-agent does: such a
branch is a root. The path of a token is all that it was sampled after: the prompt or nothing, then
the tokens of the log that lead to it.

    log      0 1 2 3 4 5 6 7 8           branches (5, 3), (7, None)
    paths    prompt 0 1 2 3 4
             prompt 0 1 2 5 6
             7 8

Shapes: P prompt tokens, T completion tokens (all branches and turns, environment tokens included),
W bytes that name the experts of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta

SCHEMA = 2
OLDEST_SCHEMA = 1
"""Records of schema 1 are those of schema 2 without any of its optional fields. They are written as
schema 1, so that older peers read them too."""

INDEX = "index"
"""Key of the metadata with the training item whose prompt an episode answers, where a sampler chose
it."""
KEYS_PER_TOKEN = 128
"""Most keys that attention repeats for the branches of an episode, for each of its tokens: four for
each of the calls that an agent may have open. With 8 heads of keys of width 128 in bfloat16, keys
and values of a token then take 0.5 MiB at most, in one layer at a time."""
MAX_ATTACHMENTS = 1024  # of a completion or a prompt: a screenshot a turn
MAX_MESSAGES = 4096  # of an episode, and rewards of its turns
MAX_CALLS = 64  # of one message
MAX_CALL_CHARS = 200  # of a call's id or name
MAX_MESSAGE_CHARS = 2**20  # of a message, its reasoning or the arguments of a call

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


class PolicyVersion(NamedTuple):
    """Version of the weights: `step` batches trained in `lineage`. Orders by lineage, then step."""

    lineage: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    step: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    """Batches trained; -1, as for the lineage, before the first version."""


_Position: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
_CallText: TypeAlias = Annotated[str, Meta(max_length=MAX_CALL_CHARS)]
_MessageText: TypeAlias = Annotated[str, Meta(max_length=MAX_MESSAGE_CHARS)]


class Branch(NamedTuple):
    """From token `start` on (until the next branch), tokens follow `parent`.

    In a chunk both count from its first token, so a parent before the chunk is negative.
    """

    start: _Position
    parent: Annotated[int, Meta(ge=1 - 2**53, le=2**53 - 1)] | None
    """Tokens of the log up to the one that it follows: 0 = the branch follows the prompt. None = it
    is a root, follows nothing, and begins with a token of the environment."""

    def moved(self, shift: int) -> Branch:
        """Count start and parent from another token."""
        return Branch(self.start + shift, None if self.parent is None else self.parent + shift)


class Attachment(NamedTuple):
    """An image or a file among the tokens."""

    start: _Position
    """First token that stands for it."""
    kind: Literal["image", "audio", "video", "file"]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of its bytes, hexadecimal."""


class TurnReward(NamedTuple):
    """The reward of a stretch of the log, beside that of the episode."""

    start: _Position
    end: _Position
    reward: float


class RecordedCall(NamedTuple):
    """A call of a tool, as the policy wrote it."""

    call_id: _CallText
    name: _CallText
    arguments: _MessageText
    """JSON."""


class Message(NamedTuple):
    """A message of the conversation, for people and exports; tokens alone are trained."""

    start: _Position
    """Tokens of the log before its own; 0 for messages of the prompt."""
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _MessageText
    reasoning: _MessageText
    calls: Annotated[tuple[RecordedCall, ...], Meta(max_length=MAX_CALLS)]
    call_id: _CallText
    """The call that a message of a tool answers; "" for others."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From token `start` on (until the next span), tokens were sampled from `version`."""

    version: PolicyVersion
    start: int


@dataclass(frozen=True, slots=True)
class FenceRun:
    """From token `start` on (until the next run), `incarnation` made tokens under `fence`."""

    fence: int
    incarnation: str
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The tokens after the prompt, finished or not. A chunk of a snapshot is a completion too.

    Of values for each token, chunks of one completion have all or none.
    """

    token_ids: Int32
    """Sampled and environment tokens. Shape [T]."""
    behaviour_logprobs: Float32
    """log mu of the distribution sampled from, nats; 0 on environment tokens. Shape [T]."""
    loss_mask: UInt8
    """1 on sampled tokens, 0 on tokens that the environment wrote. Shape [T]."""
    versions: tuple[VersionSpan, ...]
    """Starts ascend from 0; empty iff T = 0."""
    fences: tuple[FenceRun, ...]
    """Starts ascend from 0 and fences never decrease; empty iff T = 0."""
    branches: tuple[Branch, ...] = ()
    """Starts ascend, and a parent is below its start. The first tokens of a record follow the
    prompt."""
    experts: UInt8 | None = None
    """Experts that each token was routed to; None = not recorded. Shape [T, W]."""
    support_sizes: Int32 | None = None
    """Tokens of the vocabulary that each one was drawn from, 0 = all; None = all. Shape [T]."""
    support_ids: Int32 | None = None
    """These tokens, one token's after the other's. Shape [sum of `support_sizes`]."""
    teacher_logprobs: Float32 | None = None
    """log-probs under a teacher, nats; 0 on environment tokens; None = not scored. Shape [T]."""
    attachments: tuple[Attachment, ...] = ()

    @property
    def num_trained(self) -> int:
        """Count the tokens with loss mask 1."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One prompt with one finished completion and its reward."""

    task_id: int
    group_id: int
    purpose: str
    """`train` or `eval`."""
    prompt_ids: Int32
    """Shape [P]."""
    completion: Completion
    reward: float
    reward_parts: dict[str, float]
    """Named parts of the reward, such as `exact`."""
    finish_reason: str
    """`stop`, `length` or `environment`."""
    environment_metrics: dict[str, float]
    incarnation: str
    """Incarnation of the actor that submitted it."""
    started_at: float
    """Unix seconds at which its first lease began generating."""
    finished_at: float
    metadata: dict[str, str] = field(default_factory=dict)
    """Small free-form strings, such as the answer's text for people; see `INDEX`."""
    prompt_experts: UInt8 | None = None
    """Experts that each token of the prompt was routed to. Shape [P, W]."""
    prompt_attachments: tuple[Attachment, ...] = ()
    turn_rewards: tuple[TurnReward, ...] = ()
    messages: tuple[Message, ...] = ()
    """In the order of the log."""


# --------------------------------------------------------------------------------------------------
# The tree of a completion with branches.


class Stretch(NamedTuple):
    """Tokens of a log that follow one another; others follow its last one, or none."""

    start: int
    end: int
    parent: int | None
    """As that of a branch."""


def stretches(branches: Sequence[Branch], length: int) -> list[Stretch]:
    """Cut the log of a completion where branches begin and where they leave their parent.

    The parent of a stretch is 0, None, or the end of an earlier one, or lies before the chunk.
    """
    parents = dict(branches)
    cuts = {0, *parents, *(parent for parent in parents.values() if parent and parent > 0)}
    starts = sorted(cuts - {length})
    return [
        Stretch(start, end, parents.get(start, start))
        for start, end in zip(starts, [*starts, length][1:], strict=True)
    ]


def trajectories(branches: Sequence[Branch], length: int) -> list[int]:
    """Number the trajectories of a completion: each token is in one. Shape [T].

    A trajectory goes on with the first token of the log that follows its last one, and ends where
    none does. Others that follow the same token begin trajectories of their own.
    """
    numbers: list[int] = []
    ends: dict[int | None, int] = {0: 0}
    count = 0
    for start, end, parent in stretches(branches, length):
        number = ends.pop(parent, None)
        if number is None:
            count += 1
            number = count
        ends[end] = number
        numbers += [number] * (end - start)
    return numbers


class Path(NamedTuple):
    """The path of the last token of a stretch."""

    length: int
    """Tokens of the log on it, that token included."""
    is_rooted: bool
    """Whether it begins with a root, and not behind the prompt."""


def paths(branches: Sequence[Branch], length: int) -> list[Path]:
    """Measure the path of each stretch of a whole completion."""
    by_end: dict[int | None, Path] = {0: Path(0, is_rooted=False), None: Path(0, is_rooted=True)}
    for start, end, parent in stretches(branches, length):
        before = by_end[parent]
        by_end[end] = before._replace(length=before.length + end - start)
    return list(by_end.values())[2:]


def longest_path(branches: Sequence[Branch], length: int) -> int:
    """Count the tokens of the log on the longest path behind the prompt."""
    if not branches:
        return length
    return max(path.length for path in paths(branches, length) if not path.is_rooted)


def attended_keys(branches: Sequence[Branch], length: int, num_prompt: int) -> int:
    """Count the keys that the stretches of a completion attend to, each those of its own path."""
    return sum(
        path.length + (0 if path.is_rooted else num_prompt) for path in paths(branches, length)
    )
