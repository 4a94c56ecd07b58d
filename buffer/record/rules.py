"""What makes an episode or a chunk valid: the rules that encoder and decoder share.

Judges values that may come from a stranger, so every type is looked at before it is used, and every
refusal is a RecordError. Knows nothing of bytes (`codec.py`) or of what a record is for.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from configs.errors import RecordError

from .episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan

MAX_NUMBER = 2**53 - 1  # ids and fences pass through Lua, whose numbers are doubles
MAX_TOKENS = 2**22  # 16 MiB, the largest record, as int32
MAX_NAME_CHARS = 256
MAX_ENTRIES = 256  # of each small map; they are for people, not for bulk
MAX_TEXT_CHARS = 65536
MAX_LOGPROB = 1e-2  # nats; above 0 only by rounding
PURPOSES = ("train", "eval")
FINISH_REASONS = ("stop", "length", "environment")

# The methods `min` and `max` of an array are these behind a function of Python, which costs more
# than the look at a whole completion; a broker validates every episode of the fleet.
_min, _max = np.minimum.reduce, np.maximum.reduce


def check_episode(episode: Episode) -> None:
    """Refuse an episode that the learner could not train on.

    Raises:
        RecordError: names the field, what it must be, and what it was.
    """
    _number("task_id", episode.task_id)
    _number("group_id", episode.group_id)
    _choice("purpose", episode.purpose, PURPOSES)
    _choice("finish_reason", episode.finish_reason, FINISH_REASONS)
    _array("prompt_ids", episode.prompt_ids, np.int32)
    _ids("prompt_ids", episode.prompt_ids)
    if not episode.prompt_ids.size:
        raise RecordError("prompt_ids must not be empty, got 0 tokens; the record is refused")
    check_completion(episode.completion)
    if not episode.completion.token_ids.size:
        raise RecordError("token_ids must not be empty, got 0 tokens; there is nothing to train on")
    _finite("reward", episode.reward)
    _finite("started_at", episode.started_at)
    _finite("finished_at", episode.finished_at)
    _text("incarnation", episode.incarnation, MAX_NAME_CHARS)
    _floats("reward_parts", episode.reward_parts)
    _floats("environment_metrics", episode.environment_metrics)
    _entries("metadata", episode.metadata)
    for name, text in episode.metadata.items():
        if type(text) is not str or len(text) > MAX_TEXT_CHARS:
            _text(f"metadata.{name}", text, MAX_TEXT_CHARS)


def check_completion(completion: Completion) -> None:
    """Refuse a completion, or a chunk of one, whose parts do not agree.

    Raises:
        RecordError: names the field, what it must be, and what it was.
    """
    tokens, logprobs, mask = (
        completion.token_ids,
        completion.behaviour_logprobs,
        completion.loss_mask,
    )
    _array("token_ids", tokens, np.int32)
    _array("behaviour_logprobs", logprobs, np.float32)
    _array("loss_mask", mask, np.uint8)
    length = tokens.size
    for name, array in (("behaviour_logprobs", logprobs), ("loss_mask", mask)):
        if array.size != length:
            raise RecordError(
                f"{name} must have one value per token = {length}, got {array.size}; "
                "the record is refused"
            )
    if length:
        _ids("token_ids", tokens)
        _values(logprobs, mask)
    _spans(completion, length)


def _values(logprobs: np.ndarray, mask: np.ndarray) -> None:
    ones = mask.tobytes().count(1)  # of bytes: a tenth of what a look through numpy costs
    is_mixed = ones != mask.size
    if is_mixed and (largest := _max(mask)) > 1:
        raise RecordError(f"loss_mask must be 0 or 1, got {int(largest)}; the record is refused")
    # The largest of values with a NaN is NaN, and no comparison with a NaN holds: two looks find
    # all.
    low, high = float(_min(logprobs)), float(_max(logprobs))
    if not (low > -math.inf and high <= MAX_LOGPROB):
        raise RecordError(
            f"behaviour_logprobs must be finite and <= 0, got {low} to {high}; "
            "an importance ratio cannot be computed from them"
        )
    if is_mixed and np.any(logprobs[mask == 0]):
        raise RecordError(
            "behaviour_logprobs must be 0 where loss_mask is 0, got other values; "
            "the policy did not sample these tokens"
        )


def _spans(completion: Completion, length: int) -> None:
    for span in completion.versions:
        if not isinstance(span, VersionSpan) or not isinstance(span.version, PolicyVersion):
            raise RecordError(f"versions must be spans, got {type(span).__name__}")
        _number("versions.lineage", span.version.lineage)
        _number("versions.step", span.version.step)
    _starts("versions", [span.start for span in completion.versions], length)
    for run in completion.fences:
        if not isinstance(run, FenceRun):
            raise RecordError(f"fences must be runs, got {type(run).__name__}")
        _number("fences.fence", run.fence)
        _text("fences.incarnation", run.incarnation, MAX_NAME_CHARS)
    _starts("fences", [run.start for run in completion.fences], length)
    for before, after in pairwise(completion.fences):
        if after.fence < before.fence:
            raise RecordError(
                f"fences must never decrease, got {before.fence} then {after.fence}; "
                "tokens of a lost lease are in this record"
            )


def _starts(name: str, starts: list[int], length: int) -> None:
    if length and len(starts) == 1 and type(starts[0]) is int and starts[0] == 0:
        return  # nearly every record: one version, one actor
    for start in starts:
        _number(f"{name}.start", start)
    if bool(starts) != bool(length) or len(starts) > length:
        raise RecordError(f"{name} must cover {length} tokens, got {len(starts)} spans")
    ascending = all(a < b for a, b in pairwise(starts))
    if starts and (starts[0] != 0 or not ascending or starts[-1] >= length):
        raise RecordError(
            f"{name}.start must ascend from 0 and stay below {length}, got {starts[:8]}; "
            "the record is refused"
        )


def _array(name: str, array: object, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise RecordError(
            f"{name} must be a flat {dtype.__name__} array, got {type(array).__name__}"
        )
    if array.size > MAX_TOKENS:
        raise RecordError(f"{name} must have at most {MAX_TOKENS} values, got {array.size}")


def _ids(name: str, ids: np.ndarray) -> None:
    if ids.size and _min(ids) < 0:
        raise RecordError(
            f"{name} must be >= 0, got {int(_min(ids))}; no vocabulary has such a token"
        )


def _number(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise RecordError(f"{name} must be an integer from 0 to {MAX_NUMBER}, got {value!r:.80}")


def _finite(name: str, value: object) -> None:
    if type(value) is not float or not math.isfinite(value):
        raise RecordError(f"{name} must be a finite float, got {value!r:.80}")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecordError(f"{name} must be one of {', '.join(allowed)}, got {value!r:.80}")


def _text(name: str, value: object, max_chars: int) -> None:
    if type(value) is not str or len(value) > max_chars:
        shown = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise RecordError(f"{name:.80} must be text of at most {max_chars} characters, got {shown}")


def _entries(name: str, entries: object) -> None:
    if type(entries) is not dict or len(entries) > MAX_ENTRIES:
        raise RecordError(f"{name} must be a map of at most {MAX_ENTRIES} entries")
    for key in entries:
        if type(key) is not str or len(key) > MAX_NAME_CHARS:
            _text(f"key of {name}", key, MAX_NAME_CHARS)


def _floats(name: str, entries: object) -> None:
    _entries(name, entries)
    assert isinstance(entries, dict)
    for key, value in entries.items():
        if type(value) is not float or not math.isfinite(value):
            _finite(f"{name}.{key}", value)
