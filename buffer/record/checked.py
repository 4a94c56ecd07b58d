"""Fields of records and chunks, read from bytes and checked by every rule.

Both directions of the codec and a broker's summaries read through this module. Whoever reads many
at once checks their numbers together, by `check_numbers`, which is quicker than one by one.
"""

from __future__ import annotations

from configs.errors import RecordError

from .rules import check_completion, check_episode, check_fences, check_numbers
from .schema import CompletionFields, EpisodeFields
from .wire import COMPLETION, EPISODE, read, read_several


def checked_record(record: bytes, max_bytes: int) -> EpisodeFields:
    """Read and check all of a record."""
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
        check_fences([fence for fields in parts for fence, _, _ in fields.fences])
    return parts


def _check_size(record: bytes, max_bytes: int) -> None:
    if len(record) > max_bytes:
        raise RecordError(
            f"a record must have at most {max_bytes} bytes, got {len(record)}; "
            "raise buffer.max_episode_bytes or shorten run.max_completion_tokens"
        )
