"""Summaries of records and chunks for a broker, checked together without their episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from configs.errors import RecordError

from .rules import (
    ANY_RUN,
    EpisodeLimits,
    check_chunks,
    check_completion,
    check_episode,
    check_numbers,
)
from .wire import COMPLETION, EPISODE, CompletionFields, EpisodeFields, read, read_several

# --------------------------------------------------------------------------------------------------
# Fields of records and chunks, read from bytes and checked by every rule.
#
# Both directions of the codec and a broker's summaries read through this module. The numbers of
# many records are checked together, by `check_numbers`, which is quicker than one by one.


def checked_record(record: bytes, max_bytes: int) -> EpisodeFields:
    """Read and check all of a record; raises RecordError, as all functions here."""
    fields = record_but_numbers(record, max_bytes)
    check_numbers([fields.prompt], [fields.completion])
    return fields


def record_but_numbers(record: bytes, max_bytes: int) -> EpisodeFields:
    """Read a record and check all but the numbers in its arrays."""
    _check_size(record, max_bytes)
    fields = read(EPISODE, record)
    check_episode(fields)
    return fields


def checked_chunk(chunk: bytes, max_bytes: int) -> list[CompletionFields]:
    """Read and check all of a chunk."""
    parts = chunk_but_numbers(chunk, max_bytes)
    check_numbers([], parts)
    return parts


def chunk_but_numbers(chunk: bytes, max_bytes: int) -> list[CompletionFields]:
    """Read a chunk, one map or several, and check all but the numbers in its arrays."""
    _check_size(chunk, max_bytes)
    parts = read_several(COMPLETION, chunk)
    for fields in parts:
        check_completion(fields)
    if len(parts) > 1:
        check_chunks(parts)
    return parts


def _check_size(record: bytes, max_bytes: int) -> None:
    if len(record) > max_bytes:
        raise RecordError(
            f"a record must have at most {max_bytes} bytes, got {len(record)}; "
            "raise buffer.max_episode_bytes, or lower run.max_completion_tokens"
        )


# --------------------------------------------------------------------------------------------------
# Summaries of records and chunks for a broker, checked together without their episodes.


class Summary(NamedTuple):
    """The facts of a record or a chunk that a broker needs."""

    task_id: int
    """Task of the record; -1 for a chunk."""
    length: int
    """Tokens of the completion."""
    newest: tuple[int, int]
    """Lineage and step of the newest version of its tokens."""
    oldest: tuple[int, int]
    """Lineage and step of the oldest version of its tokens; (-1, -1) without tokens."""
    first_fence: int
    """First fence of its tokens; -1 without tokens."""
    fence: int
    """Last fence of its tokens; -1 without tokens."""
    is_scored: bool = False
    """Whether the record has the log-probs of a teacher."""


def summaries_of_records(
    records: Sequence[bytes], *, max_bytes: int, limits: EpisodeLimits = ANY_RUN
) -> list[Summary]:
    """Check episode records and sum each up, in order, without decoding them into episodes.

    Raises:
        RecordError: The first invalid record, as from `decode_episode`, or one beyond the limits.
    """
    episodes: list[EpisodeFields] = []
    try:
        for record in records:
            fields = record_but_numbers(record, max_bytes)
            limits.check_prompt(len(fields.prompt) // 4)
            limits.check_completion(fields.completion.branches, len(fields.completion.mask))
            episodes.append(fields)
        check_numbers([e.prompt for e in episodes], [e.completion for e in episodes], limits)
    except RecordError:
        for episode in episodes:  # an earlier record may have bad numbers
            check_numbers([episode.prompt], [episode.completion], limits)
        raise
    return [
        _summary(episode.task_id, [episode.completion])._replace(
            is_scored=_is_scored(episode.completion)
        )
        for episode in episodes
    ]


def summaries_of_chunks(
    chunks: Sequence[bytes], *, max_bytes: int, limits: EpisodeLimits = ANY_RUN
) -> list[Summary]:
    """Check chunks of completions and sum each up, in order.

    Raises:
        RecordError: The first invalid chunk, as from `decode_completion`, or one beyond the limits.
    """
    read_chunks: list[list[CompletionFields]] = []
    try:
        for chunk in chunks:
            parts = chunk_but_numbers(chunk, max_bytes)
            for fields in parts:
                limits.check_completion(fields.branches, len(fields.mask))
            read_chunks.append(parts)
        check_numbers([], [fields for parts in read_chunks for fields in parts], limits)
    except RecordError:
        for parts in read_chunks:
            check_numbers([], parts, limits)
        raise
    return [_summary(-1, parts) for parts in read_chunks]


def _is_scored(fields: CompletionFields) -> bool:
    return fields.extras is not None and fields.extras.teacher_logprobs is not None


def _summary(task_id: int, parts: Sequence[CompletionFields]) -> Summary:
    """Sum up a completion whose parts have been checked."""
    if len(parts) == 1 and len(parts[0].versions) == len(parts[0].fences) == 1:  # nearly all
        [(lineage, step, _)], [(fence, _, _)] = parts[0].versions, parts[0].fences
        return Summary(task_id, len(parts[0].mask), (lineage, step), (lineage, step), fence, fence)
    length = sum(len(fields.mask) for fields in parts)
    versions = [(lineage, step) for fields in parts for lineage, step, _ in fields.versions]
    fences = [fence for fields in parts for fence, _, _ in fields.fences]  # they never decrease
    none = (-1, -1)
    newest, oldest = max(versions, default=none), min(versions, default=none)
    first, last = (fences[0], fences[-1]) if fences else none
    return Summary(task_id, length, newest, oldest, first, last)
