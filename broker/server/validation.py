"""Validation of well-formed messages: ranges, and records that are what they claim to be.

Runs before the store is touched, so a message that fails here has changed nothing.
"""

from __future__ import annotations

from broker.protocol.messages import MAX_LINES, BeatRequest, Hello, LeaseRequest, SubmitRequest
from buffer.record.codec import lengths_of, task_ids_of
from configs.errors import RecordError


def check_hello(hello: Hello, *, incarnation: str) -> None:
    """Refuse a HELLO in the name of another incarnation."""
    if hello.incarnation != incarnation:
        raise RecordError(f"incarnation must be {incarnation!r:.80}, got {hello.incarnation!r:.80}")
    if not 0 < len(hello.incarnation) <= 200:
        raise RecordError(f"incarnation must have 1 to 200 characters, got {len(incarnation)}")
    _in_range("capacity", hello.capacity, 1, MAX_LINES)


def check_lease(request: LeaseRequest, *, capacity: int) -> None:
    """Refuse a request for more than the capacity that the actor declared."""
    _in_range("n", request.n, 1, capacity)


def check_beats(request: BeatRequest, *, max_bytes: int) -> None:
    """Refuse chunks that are not a completion of the length they claim."""
    full = [beat for beat in request.beats if beat.chunk or beat.num_tokens]
    lengths = lengths_of([beat.chunk for beat in full], max_bytes=max_bytes)
    for beat, length in zip(full, lengths, strict=True):
        if length != beat.num_tokens:
            raise RecordError(
                f"chunk of task {beat.task_id} must have {beat.num_tokens} tokens, got {length}"
            )


def check_submissions(request: SubmitRequest, *, max_bytes: int) -> None:
    """Refuse records that are malformed or of another task."""
    owners = task_ids_of([s.record for s in request.submissions], max_bytes=max_bytes)
    for submission, owner in zip(request.submissions, owners, strict=True):
        if owner != submission.task_id:
            raise RecordError(f"record must be of task {submission.task_id}, got task {owner}")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RecordError(f"{name} must be between {low} and {high}, got {value}")
