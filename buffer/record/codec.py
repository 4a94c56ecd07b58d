"""Episodes and completions to bytes and back, each checked on both sides.

Written bytes are read back before they leave, so one schema and one set of rules (`wire.py`,
`rules.py`) check records at both ends, and neither end has to trust the other. Any fault of a
record is a `RecordError`, which loses one episode and ends neither actor nor broker.

A completion's bytes may be several maps in a row, the chunks of one snapshot: the store joins long
chunk lists by concatenation, and `decode_completion` reads them as one completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from configs.errors import RecordError, quoted
from configs.tables.buffer import LARGEST_EPISODE_BYTES

from .episode import (
    OLDEST_SCHEMA,
    SCHEMA,
    Completion,
    Episode,
    FenceRun,
    PolicyVersion,
    VersionSpan,
)
from .rules import check_fences, check_widths
from .summaries import checked_chunk, checked_record
from .wire import (
    MAX_NUMBER,
    CompletionExtras,
    CompletionFields,
    EpisodeExtras,
    EpisodeFields,
    write,
)

MAX_RECORD_BYTES = LARGEST_EPISODE_BYTES

# Made once: numpy parses the name of a type each time it is given one.
_INTS, _FLOATS, _BYTES = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_NO_EXTRAS, _NO_VALUES = EpisodeExtras(), CompletionExtras()


def encode_episode(episode: Episode, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Turn a finished episode into its record; rewards and metrics may be any real numbers.

    Raises:
        RecordError: The episode is malformed, or its record is longer than `max_bytes`.
    """
    completion, extras = _fields_of(episode.completion), _episode_extras(episode)
    record = write(
        EpisodeFields(
            schema=completion.schema if extras is None else SCHEMA,
            task_id=episode.task_id,
            group_id=episode.group_id,
            purpose=episode.purpose,  # type: ignore[arg-type]  # looked at when it is read back
            prompt=_to_bytes("prompt_ids", episode.prompt_ids, _INTS),
            completion=completion,
            reward=_real(episode.reward),
            parts=_reals(episode.reward_parts),
            finish=episode.finish_reason,  # type: ignore[arg-type]  # so is this
            metrics=_reals(episode.environment_metrics),
            inc=episode.incarnation,
            started=episode.started_at,
            finished=episode.finished_at,
            text=episode.metadata,
            extras=extras,
        )
    )
    checked_record(record, max_bytes)
    return record


def decode_episode(record: bytes, *, max_bytes: int = MAX_RECORD_BYTES) -> Episode:
    """Turn a record back into the episode.

    Raises:
        RecordError: The bytes are malformed.
    """
    fields = checked_record(record, max_bytes)
    extras = fields.extras or _NO_EXTRAS
    return Episode(
        task_id=fields.task_id,
        group_id=fields.group_id,
        purpose=fields.purpose,
        prompt_ids=_to_array(fields.prompt, _INTS),
        completion=_completion_of(fields.completion),
        reward=fields.reward,
        reward_parts=fields.parts,
        finish_reason=fields.finish,
        environment_metrics=fields.metrics,
        incarnation=fields.inc,
        started_at=fields.started,
        finished_at=fields.finished,
        metadata=fields.text,
        prompt_experts=_to_experts(extras.prompt_experts, len(fields.prompt) // 4),
        prompt_attachments=extras.prompt_attachments,
        turn_rewards=extras.turn_rewards,
        messages=extras.messages,
    )


def encode_completion(completion: Completion, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Turn a completion, or the chunk of a snapshot, into bytes.

    Raises:
        RecordError: The completion is malformed, or longer than `max_bytes`.
    """
    chunk = write(_fields_of(completion))
    checked_chunk(chunk, max_bytes)
    return chunk


def decode_completion(chunk: bytes, *, max_bytes: int = MAX_RECORD_BYTES) -> Completion:
    """Turn bytes back into a completion; several maps in a row are joined.

    Raises:
        RecordError: The bytes are malformed.
    """
    parts = [_completion_of(fields) for fields in checked_chunk(chunk, max_bytes)]
    return parts[0] if len(parts) == 1 else join_completions(parts)


def join_completions(chunks: Sequence[Completion]) -> Completion:
    """Put the chunks of one snapshot together, in order.

    Neighbouring spans of the same version, and runs of the same fence and actor, become one. No
    chunks make an empty completion.

    Raises:
        RecordError: A fence decreases from one chunk to the next, or only some chunks have a value
            for each of their tokens.
    """
    chunks = [chunk for chunk in chunks if chunk.token_ids.size]
    starts = np.cumsum([0, *(chunk.token_ids.size for chunk in chunks)]).tolist()
    versions: list[VersionSpan] = []
    fences: list[FenceRun] = []
    shifted = [*zip(starts, chunks, strict=False)]
    for shift, chunk in shifted:
        for span in chunk.versions:
            if not versions or versions[-1].version != span.version:
                versions.append(VersionSpan(span.version, shift + span.start))
        for run in chunk.fences:
            same = fences and (fences[-1].fence, fences[-1].incarnation) == (
                run.fence,
                run.incarnation,
            )
            if not same:
                fences.append(FenceRun(run.fence, run.incarnation, shift + run.start))
    check_fences([run.fence for run in fences])
    ids = [chunk.support_ids for chunk in chunks if chunk.support_ids is not None]
    return Completion(
        token_ids=_concatenate((chunk.token_ids for chunk in chunks), np.int32),
        behaviour_logprobs=_concatenate((chunk.behaviour_logprobs for chunk in chunks), np.float32),
        loss_mask=_concatenate((chunk.loss_mask for chunk in chunks), np.uint8),
        versions=tuple(versions),
        fences=tuple(fences),
        branches=tuple(b.moved(shift) for shift, chunk in shifted for b in chunk.branches),
        experts=_joined("experts", [chunk.experts for chunk in chunks]),
        support_sizes=_joined("support_sizes", [chunk.support_sizes for chunk in chunks]),
        support_ids=np.concatenate(ids) if ids else None,
        teacher_logprobs=_joined("teacher_logprobs", [chunk.teacher_logprobs for chunk in chunks]),
        attachments=tuple(
            a._replace(start=a.start + shift) for shift, chunk in shifted for a in chunk.attachments
        ),
    )


def _joined(name: str, arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Join the values that chunks have for each of their tokens; None if none has any."""
    check_widths(name, [None if a is None else a.nbytes // len(a) for a in arrays])
    values = [array for array in arrays if array is not None]
    return np.concatenate(values) if values else None


def _episode_extras(episode: Episode) -> EpisodeExtras | None:
    extras = EpisodeExtras(
        prompt_experts=_to_bytes_or_none("prompt_experts", episode.prompt_experts, _BYTES, ndim=2),
        prompt_attachments=episode.prompt_attachments,
        turn_rewards=episode.turn_rewards,
        messages=episode.messages,
    )
    return None if extras == _NO_EXTRAS else extras


def _completion_extras(completion: Completion) -> CompletionExtras | None:
    extras = CompletionExtras(
        experts=_to_bytes_or_none("experts", completion.experts, _BYTES, ndim=2),
        support_sizes=_to_bytes_or_none("support_sizes", completion.support_sizes, _INTS),
        support_ids=_to_bytes_or_none("support_ids", completion.support_ids, _INTS),
        teacher_logprobs=_to_bytes_or_none(
            "teacher_logprobs", completion.teacher_logprobs, _FLOATS
        ),
        attachments=completion.attachments,
    )
    return None if extras == _NO_VALUES else extras


def _fields_of(completion: Completion) -> CompletionFields:
    if not isinstance(completion, Completion):
        raise RecordError(
            f"completion must be a Completion, got {quoted(completion)}; make one of its parts"
        )
    try:
        versions = [(s.version.lineage, s.version.step, s.start) for s in completion.versions]
        fences = [(run.fence, run.incarnation, run.start) for run in completion.fences]
    except (AttributeError, TypeError, ValueError) as error:
        raise RecordError(
            "completion.versions must be VersionSpans, each with a PolicyVersion, and "
            f"completion.fences FenceRuns, got {quoted(completion.versions)} and "
            f"{quoted(completion.fences)}"
        ) from error
    extras = _completion_extras(completion)
    is_plain = not completion.branches and extras is None
    return CompletionFields(
        schema=OLDEST_SCHEMA if is_plain else SCHEMA,
        tokens=_to_bytes("token_ids", completion.token_ids, _INTS),
        logprobs=_to_bytes("behaviour_logprobs", completion.behaviour_logprobs, _FLOATS),
        mask=_to_bytes("loss_mask", completion.loss_mask, _BYTES),
        versions=versions,
        fences=fences,
        branches=completion.branches,
        extras=extras,
    )


def _completion_of(fields: CompletionFields) -> Completion:
    return Completion(
        token_ids=_to_array(fields.tokens, _INTS),
        behaviour_logprobs=_to_array(fields.logprobs, _FLOATS),
        loss_mask=_to_array(fields.mask, _BYTES),
        versions=tuple(
            [VersionSpan(PolicyVersion(lineage, k), start) for lineage, k, start in fields.versions]
        ),
        fences=tuple([FenceRun(*run) for run in fields.fences]),
        branches=fields.branches,
        **_values_of(fields),
    )


def _values_of(fields: CompletionFields) -> dict[str, Any]:
    """Read the optional fields of a completion, by their names."""
    if (extras := fields.extras) is None:
        return {}
    return {
        "experts": _to_experts(extras.experts, len(fields.mask)),
        "support_sizes": _to_array_or_none(extras.support_sizes, _INTS),
        "support_ids": _to_array_or_none(extras.support_ids, _INTS),
        "teacher_logprobs": _to_array_or_none(extras.teacher_logprobs, _FLOATS),
        "attachments": extras.attachments,
    }


def _real(value: float) -> float:
    """Turn the value of a reward function into a float; other types are left to the check."""
    if type(value) is float:
        return value
    if isinstance(value, int | np.integer | np.floating) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_NUMBER else value
    return value


def _reals(values: dict[str, float]) -> dict[str, float]:
    """Turn the values of a map into floats; other types are left to the check."""
    try:
        return {name: _real(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        return values


def _to_bytes(name: str, array: object, dtype: np.dtype[Any]) -> memoryview:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        kind = type(array).__name__
        if isinstance(array, np.ndarray):
            kind = f"{array.dtype.name} of shape {array.shape}"
        raise RecordError(f"{name} must be a flat {dtype.name} array, got {kind}; convert it")
    return np.ascontiguousarray(array, dtype).data


def _to_bytes_or_none(
    name: str, array: np.ndarray | None, dtype: np.dtype[Any], *, ndim: int = 1
) -> memoryview | None:
    if array is None:
        return None
    if ndim == 2 and isinstance(array, np.ndarray) and array.ndim == 2:
        array = array.reshape(-1)
    return _to_bytes(name, array, dtype)


def _to_array_or_none(values: memoryview | None, dtype: np.dtype[Any]) -> np.ndarray | None:
    return None if values is None else _to_array(values, dtype)


def _to_experts(values: memoryview | None, num_tokens: int) -> np.ndarray | None:
    return None if values is None else _to_array(values, _BYTES).reshape(num_tokens, -1)


def _to_array(values: memoryview, dtype: np.dtype[Any]) -> np.ndarray:
    array = np.frombuffer(bytearray(values), dtype)  # the copy is writable, as torch asks
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _concatenate(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])
