"""Tokens of one completion as they come, with log-probs, loss mask, versions and fences.

Owns the growing arrays; `rollout.py` decides what is appended. Grows by whole deltas, never token
by token, and cuts chunks for snapshots.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from buffer.record.episode import Completion, FenceRun, PolicyVersion, VersionSpan

S = TypeVar("S", VersionSpan, FenceRun)


class Transcript:
    """A completion in the making; T tokens so far."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._mask = bytearray()
        self._versions: list[VersionSpan] = []
        self._fences: list[FenceRun] = []

    @classmethod
    def of(cls, completion: Completion) -> Transcript:
        """Continue the tokens of an earlier lease."""
        transcript = cls()
        transcript._token_ids = array("i", completion.token_ids.tolist())
        transcript._logprobs = array("f", completion.behaviour_logprobs.tolist())
        transcript._mask = bytearray(completion.loss_mask.tobytes())
        transcript._versions = list(completion.versions)
        transcript._fences = list(completion.fences)
        return transcript

    def __len__(self) -> int:
        return len(self._token_ids)

    def tokens(self, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """The token ids of a stretch."""
        return tuple(self._token_ids[start:stop])

    def mask(self, start: int = 0, stop: int | None = None) -> bytes:
        """The loss mask of a stretch, one byte a token."""
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

    def sign(self, fence: int, incarnation: str) -> None:
        """Note that tokens from here on are made under this fence."""
        if not self._fences or self._fences[-1].fence != fence:
            self._fences.append(FenceRun(fence, incarnation, len(self._token_ids)))

    def completion(self, start: int = 0) -> Completion:
        """Copy the tokens from `start` on into a completion of their own."""
        return Completion(
            # Each slice is a copy of its own, which the array then shares.
            token_ids=np.frombuffer(self._token_ids[start:], dtype=np.int32),
            behaviour_logprobs=np.frombuffer(self._logprobs[start:], dtype=np.float32),
            loss_mask=np.frombuffer(self._mask[start:], dtype=np.uint8),
            versions=_from(self._versions, start, len(self)),
            fences=_from(self._fences, start, len(self)),
        )

    def _switch_version(self, version: PolicyVersion, start: int) -> None:
        if not self._versions or self._versions[-1].version != version:
            self._versions.append(VersionSpan(version, start))


def _from(spans: list[S], start: int, stop: int) -> tuple[S, ...]:
    """Spans of the tokens `start` to `stop`, counted from `start`."""
    if start >= stop:
        return ()
    if start == 0:
        return tuple(spans)
    covering = spans[bisect_right(spans, start, key=lambda span: span.start) - 1 :]
    return tuple(replace(span, start=max(0, span.start - start)) for span in covering)
