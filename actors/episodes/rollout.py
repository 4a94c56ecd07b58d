"""One episode in the making: a state machine without I/O.

    SAMPLING --take: turn ends--> JUDGING --settle: another turn--> SAMPLING
                                     |
                                     +-----settle: done, or no room--> FINISHED

`judge` and `resume` call foreign code (the environment) and therefore run elsewhere, by
`environment_workers.py`; `judge` only reads. Everything else runs on the actor's event loop.
Invariant: the transcript is a prefix of the finished completion at any time, so a kill at any
token, inside a turn, an observation or between them, costs the tokens that were not yet in the
store and nothing else.

A lease that brings tokens is continued: finished turns are found by their stop tokens and passed to
the environment again; its answers must equal the stored tokens. Otherwise the episode starts from
scratch and is counted (`restarted`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np

from actors.chat import ChatMessage, as_messages, read_prompt
from actors.engine.engine import Delta, GenerationRequest
from actors.engine.tokenizer import Tokenizer
from actors.engine.turns import StopStrings
from actors.environments.base import Conversation, Score
from actors.environments.calls import call
from broker.protocol.messages import Lease
from buffer.record.episode import (
    Branch,
    Completion,
    FenceRun,
    Int32,
    PolicyVersion,
    VersionSpan,
    attended_keys,
)

# --------------------------------------------------------------------------------------------------
# Tokens of one completion as they come, with log-probs, loss mask, versions, fences and branches.
#
# Owns the growing arrays; `rollout.py` decides what is appended. Grows by whole deltas, never token
# by token, and cuts chunks for snapshots.

S = TypeVar("S", VersionSpan, FenceRun)

STRETCH = 1024  # tokens that are looked at together: about a turn


class Transcript:
    """A completion in the making; T tokens so far."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._mask = bytearray()
        self._versions: list[VersionSpan] = []
        self._fences: list[FenceRun] = []
        self._branches: list[Branch] = []

    @classmethod
    def from_completion(cls, completion: Completion) -> Transcript:
        """Continue the tokens of an earlier lease."""
        transcript = cls()
        transcript._token_ids = array("i", completion.token_ids.tolist())
        transcript._logprobs = array("f", completion.behaviour_logprobs.tolist())
        transcript._mask = bytearray(completion.loss_mask.tobytes())
        transcript._versions = list(completion.versions)
        transcript._fences = list(completion.fences)
        transcript._branches = list(completion.branches)
        return transcript

    def __len__(self) -> int:
        return len(self._token_ids)

    def tokens(self, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """Return the token ids of a stretch."""
        return tuple(self._token_ids[start:stop])

    def array(self, start: int, stop: int) -> Int32:
        """Copy the token ids of a stretch. Shape [stop - start]."""
        return np.frombuffer(self._token_ids[start:stop], dtype=np.int32)

    def logprobs(self, start: int, stop: int) -> Sequence[float]:
        """Return the log-probs of a stretch."""
        return self._logprobs[start:stop]

    def end_of(self, token_ids: Sequence[int], start: int) -> int | None:
        """Return the position after the first of these tokens from `start` on, or None.

        The search stops at that token: an episode may have thousands of turns.
        """
        for begin in range(start, len(self), STRETCH):
            stretch = self._token_ids[begin : begin + STRETCH]
            positions = [stretch.index(token) for token in token_ids if token in stretch]
            if positions:
                return begin + min(positions) + 1
        return None

    def mask(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the loss mask of a stretch, one byte a token."""
        return bytes(self._mask[start:stop])

    def append_sampled(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[VersionSpan]
    ) -> None:
        """Append tokens of the policy; span starts count from the first of them."""
        base = len(self._token_ids)
        for span in versions:
            if span.start < len(token_ids):
                self._switch_version(span.version, base + span.start)
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._mask.extend(b"\x01" * len(token_ids))

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment; they share the version span of the turn before them."""
        assert self._versions, "an observation answers a turn"
        self._token_ids.extend(token_ids)
        self._logprobs.extend([0.0] * len(token_ids))
        self._mask.extend(b"\x00" * len(token_ids))

    def branch(self, parent: int | None) -> None:
        """Let the next tokens follow the first `parent` tokens; None = they begin a root.

        Only the last call before tokens come counts.
        """
        start = len(self)
        assert start and (parent is None or 0 <= parent <= start)
        if self._branches and self._branches[-1].start == start:
            self._branches.pop()
        if parent != start:
            self._branches.append(Branch(start, parent))

    def attended_keys(self, num_prompt: int) -> int:
        """Count the keys that the tokens so far attend to, behind a prompt of this length."""
        return attended_keys(self._branches, len(self), num_prompt)

    def path(self, stop: int) -> tuple[list[tuple[int, int]], bool]:
        """Return the stretches of the log that lead to its token before `stop`, in order.

        The second value says whether they begin at a root and so follow no prompt.
        """
        stretches: list[tuple[int, int]] = []
        parent: int | None = stop
        while parent:
            at = bisect_right(self._branches, parent - 1, key=lambda branch: branch.start) - 1
            start, before = self._branches[at] if at >= 0 else (0, 0)
            stretches.append((start, parent))
            parent = before
        return stretches[::-1], parent is None

    def sign(self, fence: int, incarnation: str) -> None:
        """Note that tokens from here on are made under this fence."""
        if not self._fences or self._fences[-1].fence != fence:
            self._fences.append(FenceRun(fence, incarnation, len(self._token_ids)))

    def completion(self, start: int = 0) -> Completion:
        """Copy the tokens from `start` on into a completion of their own."""
        return Completion(
            # Each slice is a copy of its own, which the array then shares.
            token_ids=self.array(start, len(self)),
            behaviour_logprobs=np.frombuffer(self._logprobs[start:], dtype=np.float32),
            loss_mask=np.frombuffer(self._mask[start:], dtype=np.uint8),
            versions=_spans_between(self._versions, start, len(self)),
            fences=_spans_between(self._fences, start, len(self)),
            branches=tuple(
                branch.moved(-start)
                for branch in self._branches
                if start <= branch.start < len(self)
            ),
        )

    def _switch_version(self, version: PolicyVersion, start: int) -> None:
        if not self._versions or self._versions[-1].version != version:
            self._versions.append(VersionSpan(version, start))


def _spans_between(spans: list[S], start: int, stop: int) -> tuple[S, ...]:
    """Spans of the tokens `start` to `stop`, counted from `start`."""
    if start >= stop:
        return ()
    if start == 0:
        return tuple(spans)
    covering = spans[bisect_right(spans, start, key=lambda span: span.start) - 1 :]
    return tuple(replace(span, start=max(0, span.start - start)) for span in covering)


# --------------------------------------------------------------------------------------------------
# One episode in the making: a state machine without I/O.


class State(StrEnum):
    """States of an episode."""

    SAMPLING = "sampling"
    """Waits for the engine."""
    JUDGING = "judging"
    """Waits for the environment."""
    FINISHED = "finished"


class ReplayMismatch(ValueError):
    """The environment did not answer as it did when the tokens of an earlier lease were made."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Answer of the environment to a turn."""

    turns: tuple[ChatMessage, ...]
    """The turn, and the messages that follow it if the policy goes on."""
    observation_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """None = the policy goes on with another turn."""
    score: Score | None = None
    """Set iff the episode is finished."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Values that all episodes of one actor share."""

    tokenizer: Tokenizer
    incarnation: str
    max_completion_tokens: int
    limit_s: float = 30.0
    """Time limit of one call of an `async` environment."""
    stops: StopStrings | None = None
    """Strings that end a turn."""


class Rollout:
    """An episode of one lease."""

    def __init__(
        self,
        lease: Lease,
        conversation: Conversation,
        prompt_ids: tuple[int, ...],
        context: RolloutContext,
    ) -> None:
        """Begin without a token."""
        self.lease = lease
        self.conversation = conversation
        self.prompt_ids = prompt_ids
        self.state = State.SAMPLING
        self.finish_reason = ""
        self.score: Score | None = None
        self.num_turns = 0
        self.turns: list[ChatMessage] = []
        """All that was said after the prompt."""
        self.resumed_at = 0
        self.restarted = False
        self._context = context
        self._transcript = Transcript()
        self._turn_start = 0
        self._turn_end = 0
        self._cut = False
        self._is_open = False
        """A string ended the turn, not its end token."""

    @property
    def length(self) -> int:
        """Completion tokens so far."""
        return len(self._transcript)

    def text(self) -> str:
        """All turns and observations as text, without what ended the last turn."""
        decode = self._context.tokenizer.decode
        if self._is_open:
            return decode(self._transcript.tokens(0, self._turn_start)) + self.turns[-1].content
        return decode(self._transcript.tokens(0, self.length - (not self._cut)))

    def completion(self, start: int = 0) -> Completion:
        """Return the completion from token `start` on."""
        return self._transcript.completion(start)

    def prompt_array(self) -> Int32:
        """Return the prompt's tokens. Shape [P]."""
        return np.array(self.prompt_ids, dtype=np.int32)

    def request(self) -> GenerationRequest:
        """Return the request for the next turn."""
        assert self.state is State.SAMPLING
        spec = self.lease.spec
        return GenerationRequest(
            request_id=f"{self.lease.task_id}.{self.lease.fence}.{self.num_turns}",
            token_ids=self.prompt_ids + self._transcript.tokens(),
            max_tokens=self._context.max_completion_tokens - self.length,
            temperature=spec.temperature,
            stop_token_ids=self._context.tokenizer.stop_token_ids,
            stop_strings=self._context.stops,
            turn=self._transcript.tokens(self._turn_start),
            stream=(spec.seed, self.lease.task_id),
        )

    def append_delta(self, delta: Delta) -> None:
        """Append new tokens of the turn; the last delta of a turn ends it."""
        assert self.state is State.SAMPLING
        if delta.token_ids:
            self._transcript.sign(self.lease.fence, self._context.incarnation)
            self._transcript.append_sampled(delta.token_ids, delta.logprobs, delta.versions)
        if delta.finish_reason is not None:
            self._end_turn(self.length)

    async def judge(self) -> Judgement:
        """Pass the turn to the environment, and score after the last one. Only reads."""
        tokenizer = self._context.tokenizer
        stop = self._turn_end if self._cut or self._is_open else self._turn_end - 1
        turn = tokenizer.decode(self._transcript.tokens(self._turn_start, stop))
        if self._is_open and self._context.stops is not None:
            turn = self._context.stops.cut(turn)
        step = await call(self.conversation.step, turn, limit_s=self._context.limit_s)
        messages = (ChatMessage("assistant", turn),)
        if self._cut:
            return Judgement(messages, (), "length", await self._score())
        if step.done:
            reason = "environment" if step.observation else "stop"
            return Judgement(messages, (), reason, await self._score())
        observation = read_prompt(step.observation, "an observation")
        observation_ids = tokenizer.encode_observation(observation, is_open=self._is_open)
        if self._turn_end + len(observation_ids) >= self._context.max_completion_tokens:
            return Judgement(messages, (), "length", await self._score())
        return Judgement((*messages, *as_messages(observation)), observation_ids)

    def settle(self, judgement: Judgement) -> None:
        """Apply what `judge` returned: go on with the next turn, or finish."""
        assert self.state is State.JUDGING
        self.num_turns += 1
        self.turns += judgement.turns
        if judgement.finish_reason is not None:
            self.state = State.FINISHED
            self.finish_reason, self.score = judgement.finish_reason, judgement.score
            return
        # While resuming, the store may already have some of the observation, or more than that.
        missing = judgement.observation_ids[self.length - self._turn_end :]
        if missing:
            self._transcript.sign(self.lease.fence, self._context.incarnation)
            self._transcript.append_observation(missing)
        self._turn_start = self._turn_end + len(judgement.observation_ids)
        self.state = State.SAMPLING

    def _end_turn(self, end: int) -> None:
        turn, stops = self._transcript.tokens(self._turn_start, end), self._context.stops
        has_end_token = bool(turn) and turn[-1] in self._context.tokenizer.stop_token_ids
        has_string = stops is not None and stops.find_end(turn, max(0, len(turn) - 1)) is not None
        self._cut = not has_end_token and not has_string
        self._is_open = has_string and not has_end_token
        self._turn_end = end
        self.state = State.JUDGING

    async def _score(self) -> Score:
        score: Score = await call(self.conversation.score, limit_s=self._context.limit_s)
        return score

    async def resume(self, partial: Completion) -> None:
        """Play the turns of `partial` again, as the lease that made them did.

        Raises:
            ReplayMismatch: `partial` does not fit the conversation, which cannot be used again.
        """
        if partial.branches:
            raise ReplayMismatch("its tokens have branches, and this environment makes none")
        self._transcript = Transcript.from_completion(partial)
        self.resumed_at = self.length
        while (end := self._next_turn_end()) is not None:
            self._check_replayed(self._turn_start, end, sampled=True)
            self._end_turn(end)
            judgement = await self.judge()
            stored = self._transcript.tokens(end, end + len(judgement.observation_ids))
            if judgement.observation_ids[: len(stored)] != stored:
                raise ReplayMismatch("the environment answers a finished turn differently")
            if judgement.finish_reason is not None and end < self.length:
                raise ReplayMismatch("the environment ends the episode before its tokens end")
            self._check_replayed(end, end + len(stored), sampled=False)
            self.settle(judgement)
            if self.state is State.FINISHED:
                return
        self._check_replayed(self._turn_start, self.length, sampled=True)

    def _next_turn_end(self) -> int | None:
        """End of the present turn in the stored tokens; None if it has not ended yet."""
        by_token = self._transcript.end_of(self._context.tokenizer.stop_token_ids, self._turn_start)
        limit, stops = self.length if by_token is None else by_token, self._context.stops
        for begin in () if stops is None else range(self._turn_start, limit, STRETCH):
            turn = self._transcript.tokens(self._turn_start, min(begin + STRETCH, limit))
            assert stops is not None
            by_string = stops.find_end(turn, begin - self._turn_start)
            if by_string is not None:
                return self._turn_start + by_string
        if by_token is not None:
            return by_token
        return self.length if self.length >= self._context.max_completion_tokens else None

    def _check_replayed(self, start: int, stop: int, *, sampled: bool) -> None:
        if any(bit != sampled for bit in self._transcript.mask(start, stop)):
            raise ReplayMismatch(f"tokens {start} to {stop} must all be of one kind")
