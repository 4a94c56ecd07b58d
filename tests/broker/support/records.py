"""Records, completions and submissions of a lease, as an actor makes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from broker.protocol.messages import Lease, Submission, SubmitRequest
from buffer.record.codec import decode_episode, encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, VersionSpan
from tests.broker.support.ring import FIRST


def completion(fence: int, tokens: int = 3, incarnation: str = "actor-1") -> Completion:
    return Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        behaviour_logprobs=np.full(tokens, -0.5, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        versions=(VersionSpan(FIRST, 0),),
        fences=(FenceRun(fence, incarnation, 0),),
    )


def record_of(lease: Lease, *, task_id: int | None = None) -> bytes:
    return encode_episode(
        Episode(
            task_id=lease.task_id if task_id is None else task_id,
            group_id=lease.spec.group_id,
            purpose="train",
            prompt_ids=np.arange(4, dtype=np.int32),
            completion=completion(lease.fence),
            reward=1.0,
            reward_parts={},
            finish_reason="stop",
            environment_metrics={},
            incarnation="actor-1",
            started_at=1.0,
            finished_at=2.0,
        )
    )


def submission(lease: Lease, record: bytes | None = None, *, teacher: str = "") -> SubmitRequest:
    record = record_of(lease) if record is None else record
    return SubmitRequest((Submission(lease.task_id, lease.fence, record, teacher),))


def scored(record: bytes) -> bytes:
    """The record with a teacher's log-probs."""
    episode = decode_episode(record)
    logprobs = np.full(episode.completion.token_ids.size, -0.25, np.float32)
    return encode_episode(
        replace(episode, completion=replace(episode.completion, teacher_logprobs=logprobs))
    )
