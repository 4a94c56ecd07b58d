"""The load of every arm: real episode records of exactly 16 KiB, one for each task.

A record is made once and then only its ids are changed, so that no arm pays for making it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from buffer.record.codec import encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan

RECORD_BYTES = 16 * 2**10
BATCH = 64  # records at a time in every arm: what an actor's outbox sends under load
GROUP_SIZE = 8
FIRST_TASK = GROUP_SIZE * 2**17
"""Ids from here on, and their groups, have four bytes in msgpack, so that all records are alike."""
NEWEST = PolicyVersion(1, 2**31)  # nobody trains here: the actor is never behind the learner

_PROMPT_TOKENS = 128
_SOME_TOKENS = 1000  # enough for every length in the record to have its final number of digits
_TOKEN_BYTES = 4 + 4 + 1  # id, log-prob, mask


class Records:
    """Makes the record of any task from `FIRST_TASK` to 2**32 - 1."""

    def __init__(self) -> None:
        missing = RECORD_BYTES - len(encode_episode(_episode(_SOME_TOKENS, text="")))
        num_tokens = _SOME_TOKENS + missing // _TOKEN_BYTES
        record = encode_episode(_episode(num_tokens, text=" " * (missing % _TOKEN_BYTES)))
        assert len(record) == RECORD_BYTES, f"a record must have 16 KiB, got {len(record)}"
        task = record.index(_wire(FIRST_TASK))
        group = record.index(_wire(FIRST_TASK // GROUP_SIZE))
        assert task + 4 < group, "the codec writes the task before its group"
        self._head = record[: task + 1]
        self._middle = record[task + 5 : group + 1]
        self._tail = record[group + 5 :]

    def of(self, task_id: int) -> bytes:
        """Return the record of a task; 16 KiB are copied, nothing else is done."""
        group = struct.pack(">I", task_id // GROUP_SIZE)
        return b"".join((self._head, struct.pack(">I", task_id), self._middle, group, self._tail))

    def task_of(self, record: bytes) -> int:
        """Read the task's id back."""
        (task_id,) = struct.unpack_from(">I", record, len(self._head))
        return int(task_id)

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the records in order, a batch at a time, without end."""
        for first in count(FIRST_TASK, BATCH):
            yield [self.of(task_id) for task_id in range(first, first + BATCH)]


def _wire(number: int) -> bytes:
    return b"\xce" + struct.pack(">I", number)  # msgpack's form of a 32-bit number


def _episode(num_tokens: int, *, text: str) -> Episode:
    """A math episode of this length, with numbers that do not compress."""
    random = np.random.default_rng(seed=0)
    completion = Completion(
        token_ids=random.integers(0, 150_000, num_tokens, dtype=np.int32),
        behaviour_logprobs=-random.exponential(1.0, num_tokens).astype(np.float32),
        loss_mask=np.ones(num_tokens, np.uint8),
        versions=(VersionSpan(NEWEST, 0),),
        fences=(FenceRun(1, "actor", 0),),
    )
    episode = Episode(
        task_id=FIRST_TASK,
        group_id=FIRST_TASK // GROUP_SIZE,
        purpose="train",
        prompt_ids=random.integers(0, 150_000, _PROMPT_TOKENS, dtype=np.int32),
        completion=completion,
        reward=1.0,
        reward_parts={"exact": 1.0},
        finish_reason="stop",
        environment_metrics={"answer_tokens": 7.0},
        incarnation="actor",
        started_at=1.0,
        finished_at=2.0,
    )
    return replace(episode, metadata={"answer": text})
