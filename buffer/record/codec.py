"""Episodes and completions to bytes and back.

A record is one msgpack map; arrays travel as raw little-endian bytes, never as lists or pickle.
Both directions validate (`rules.py`), so that neither end has to trust the other.

A completion's bytes may be several maps in a row, the chunks of one snapshot: the store joins long
chunk lists by concatenation, and `decode_completion` reads them as one completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from configs.errors import RecordError

from .episode import SCHEMA, Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from .rules import MAX_NUMBER, check_completion, check_episode

MAX_RECORD_BYTES = 16 * 2**20
"""Upper bound of `buffer.max_episode_bytes`."""

_EPISODE_FIELDS = frozenset(
    {
        "schema",
        "task_id",
        "group_id",
        "purpose",
        "prompt",
        "completion",
        "reward",
        "parts",
        "finish",
    }
    | {"metrics", "inc", "started", "finished", "text"}
)
_COMPLETION_FIELDS = frozenset(["schema", "tokens", "logprobs", "mask", "versions", "fences"])

_Map = dict[str, object]

# Made once: numpy parses the name of a type each time it is given one.
_INTS, _FLOATS, _BYTES = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


def encode_episode(episode: Episode, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Turn a finished episode into its record; rewards and metrics may be any real numbers.

    Raises:
        RecordError: the episode is malformed, or its record is longer than `max_bytes`.
    """
    episode = replace(
        episode,
        reward=_real(episode.reward),
        reward_parts=_reals(episode.reward_parts),
        environment_metrics=_reals(episode.environment_metrics),
    )
    check_episode(episode)
    record = _pack(
        {
            "schema": SCHEMA,
            "task_id": episode.task_id,
            "group_id": episode.group_id,
            "purpose": episode.purpose,
            "prompt": _to_bytes(episode.prompt_ids, _INTS),
            "completion": _completion_map(episode.completion),
            "reward": episode.reward,
            "parts": episode.reward_parts,
            "finish": episode.finish_reason,
            "metrics": episode.environment_metrics,
            "inc": episode.incarnation,
            "started": episode.started_at,
            "finished": episode.finished_at,
            "text": episode.metadata,
        }
    )
    _check_size(record, max_bytes)
    return record


def decode_episode(record: bytes, *, max_bytes: int = MAX_RECORD_BYTES) -> Episode:
    """Turn a record back into the episode.

    Raises:
        RecordError: whatever is wrong with the bytes.
    """
    _check_size(record, max_bytes)
    maps = _unpack(record)
    if len(maps) != 1:
        raise RecordError(f"a record must be one msgpack map, got {len(maps)}; it is refused")
    fields = _fields(maps[0], _EPISODE_FIELDS)
    episode = Episode(
        task_id=fields["task_id"],  # type: ignore[arg-type]  # check_episode looks at every type
        group_id=fields["group_id"],  # type: ignore[arg-type]
        purpose=fields["purpose"],  # type: ignore[arg-type]
        prompt_ids=_to_array("prompt", fields["prompt"], _INTS),
        completion=_completion(fields["completion"]),
        reward=fields["reward"],  # type: ignore[arg-type]
        reward_parts=fields["parts"],  # type: ignore[arg-type]
        finish_reason=fields["finish"],  # type: ignore[arg-type]
        environment_metrics=fields["metrics"],  # type: ignore[arg-type]
        incarnation=fields["inc"],  # type: ignore[arg-type]
        started_at=fields["started"],  # type: ignore[arg-type]
        finished_at=fields["finished"],  # type: ignore[arg-type]
        metadata=fields["text"],  # type: ignore[arg-type]
    )
    check_episode(episode)
    return episode


def validate(record: bytes, *, max_bytes: int = MAX_RECORD_BYTES) -> Episode:
    """Refuse a record at the edge; the decoded episode is at hand for who wants to look further."""
    return decode_episode(record, max_bytes=max_bytes)


def encode_completion(completion: Completion, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Turn a completion, or the chunk of a snapshot, into bytes.

    Raises:
        RecordError: the completion is malformed, or longer than `max_bytes`.
    """
    check_completion(completion)
    chunk = _pack(_completion_map(completion))
    _check_size(chunk, max_bytes)
    return chunk


def decode_completion(chunk: bytes, *, max_bytes: int = MAX_RECORD_BYTES) -> Completion:
    """Turn bytes back into a completion; several maps in a row are joined.

    Raises:
        RecordError: whatever is wrong with the bytes.
    """
    _check_size(chunk, max_bytes)
    parts = [_completion(fields) for fields in _unpack(chunk)]
    for part in parts:
        check_completion(part)
    if len(parts) == 1:
        return parts[0]
    return join_completions(parts)


def join_completions(chunks: Sequence[Completion]) -> Completion:
    """Put the chunks of one snapshot together, in order.

    Neighbouring spans of the same version, and runs of the same fence and actor, become one. No
    chunks make an empty completion.

    Raises:
        RecordError: a fence decreases from one chunk to the next.
    """
    starts = np.cumsum([0, *(chunk.token_ids.size for chunk in chunks)]).tolist()
    versions: list[VersionSpan] = []
    fences: list[FenceRun] = []
    for shift, chunk in zip(starts, chunks, strict=False):
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
    joined = Completion(
        token_ids=_concatenate((chunk.token_ids for chunk in chunks), np.int32),
        behaviour_logprobs=_concatenate((chunk.behaviour_logprobs for chunk in chunks), np.float32),
        loss_mask=_concatenate((chunk.loss_mask for chunk in chunks), np.uint8),
        versions=tuple(versions),
        fences=tuple(fences),
    )
    check_completion(joined)
    return joined


def _completion_map(completion: Completion) -> _Map:
    return {
        "schema": SCHEMA,
        "tokens": _to_bytes(completion.token_ids, _INTS),
        "logprobs": _to_bytes(completion.behaviour_logprobs, _FLOATS),
        "mask": _to_bytes(completion.loss_mask, _BYTES),
        "versions": [[*span.version, span.start] for span in completion.versions],
        "fences": [[run.fence, run.incarnation, run.start] for run in completion.fences],
    }


def _completion(value: object) -> Completion:
    fields = _fields(value, _COMPLETION_FIELDS)
    return Completion(
        token_ids=_to_array("tokens", fields["tokens"], _INTS),
        behaviour_logprobs=_to_array("logprobs", fields["logprobs"], _FLOATS),
        loss_mask=_to_array("mask", fields["mask"], _BYTES),
        versions=tuple(
            [
                VersionSpan(PolicyVersion(lineage, step), start)  # type: ignore[arg-type]  # checked by validity
                for lineage, step, start in _triples("versions", fields["versions"])
            ]
        ),
        fences=tuple(
            [
                FenceRun(fence, incarnation, start)  # type: ignore[arg-type]  # checked by validity
                for fence, incarnation, start in _triples("fences", fields["fences"])
            ]
        ),
    )


def _pack(fields: _Map) -> bytes:
    try:
        packed = msgpack.packb(fields, use_bin_type=True)
    except UnicodeEncodeError as error:
        raise RecordError(f"texts of a record must be valid Unicode; {error.reason}") from error
    assert isinstance(packed, bytes)
    return packed


def _unpack(record: bytes) -> list[object]:
    """Read all msgpack values; what does not parse to the last byte is refused."""
    try:
        return [msgpack.unpackb(record, raw=False, strict_map_key=True)]
    except (msgpack.UnpackException, ValueError, OverflowError):
        pass  # several values, or none: the slower reader finds out which
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(record), raw=False, strict_map_key=True, use_list=True
    )
    unpacker.feed(record)
    values: list[object] = []
    end = 0
    try:
        while end < len(record):
            values.append(unpacker.unpack())
            end = unpacker.tell()
    except (msgpack.OutOfData, msgpack.UnpackException, ValueError, OverflowError) as error:
        name = type(error).__name__
        raise RecordError(
            f"a record must be complete msgpack, got {len(record)} bytes that end in {name}"
        ) from error
    if not values:
        raise RecordError("a record must be complete msgpack, got 0 bytes; it is refused")
    return values


def _fields(value: object, expected: frozenset[str]) -> _Map:
    if not isinstance(value, dict) or value.keys() != expected:
        raise RecordError(f"a record must be a map of {sorted(expected)}; other fields are refused")
    if type(value["schema"]) is not int or value["schema"] != SCHEMA:
        raise RecordError(
            f"schema must be {SCHEMA}, got {value['schema']!r:.40}; update the older peer"
        )
    return value


def _triples(name: str, value: object) -> list[list[object]]:
    if not isinstance(value, list) or any(type(row) is not list or len(row) != 3 for row in value):
        raise RecordError(f"{name} must be a list of triples; the record is refused")
    return value


def _real(value: float) -> float:
    """Make a float of what a reward function returned; what is no number is left to the check."""
    if isinstance(value, int | np.integer | np.floating) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_NUMBER else value
    return value


def _reals(values: dict[str, float]) -> dict[str, float]:
    return {name: _real(value) for name, value in values.items()}


def _to_bytes(array: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _to_array(name: str, value: object, dtype: np.dtype[Any]) -> np.ndarray:
    if type(value) is not bytes or len(value) % dtype.itemsize:
        size = len(value) if isinstance(value, bytes) else type(value).__name__
        raise RecordError(f"{name} must be bytes in multiples of {dtype.itemsize}, got {size}")
    array = np.frombuffer(bytearray(value), dtype)  # the copy is writable, as torch asks
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _concatenate(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])


def _check_size(record: bytes, max_bytes: int) -> None:
    if len(record) > max_bytes:
        raise RecordError(
            f"a record must have at most {max_bytes} bytes, got {len(record)}; "
            "raise buffer.max_episode_bytes or shorten run.max_completion_tokens"
        )
