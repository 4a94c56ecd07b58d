"""Records: the same bytes back, and RecordError for everything that is not one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.record.codec import (
    MAX_RECORD_BYTES,
    decode_completion,
    decode_episode,
    encode_completion,
    encode_episode,
    join_completions,
    validate,
)
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.errors import RecordError
from tests.buffer.support.episodes import completions, episodes, example_episode

RECORD = encode_episode(example_episode())
CHUNK = encode_completion(example_episode().completion)


@given(episodes)
def test_an_episode_comes_back_byte_for_byte(episode: Episode) -> None:
    record = encode_episode(episode)

    decoded = decode_episode(record)

    assert encode_episode(decoded) == record
    assert decoded.completion.versions == episode.completion.versions
    assert decoded.completion.fences == episode.completion.fences
    for array, other in (
        (decoded.prompt_ids, episode.prompt_ids),
        (decoded.completion.token_ids, episode.completion.token_ids),
        (decoded.completion.behaviour_logprobs, episode.completion.behaviour_logprobs),
        (decoded.completion.loss_mask, episode.completion.loss_mask),
    ):
        assert array.dtype == other.dtype
        assert array.tobytes() == other.tobytes()
    assert (decoded.reward, decoded.metadata) == (episode.reward, episode.metadata)
    assert decoded.reward_parts == episode.reward_parts


@given(completions(), completions())
def test_joined_chunks_are_the_completion(first: Completion, second: Completion) -> None:
    shifted = replace(second, fences=tuple(replace(run, fence=2**53 - 1) for run in second.fences))

    joined = join_completions([first, shifted])

    assert joined.token_ids.tolist() == [*first.token_ids, *second.token_ids]
    assert joined.loss_mask.tolist() == [*first.loss_mask, *second.loss_mask]
    together = encode_completion(first) + encode_completion(shifted)
    assert encode_completion(decode_completion(together)) == encode_completion(joined)


@pytest.mark.parametrize("reward", [1, np.float32(1), np.int64(1), 1.0])
def test_a_reward_may_be_any_real_number(reward: float) -> None:
    episode = replace(example_episode(), reward=reward, reward_parts={"exact": reward})

    decoded = decode_episode(encode_episode(episode))

    assert (decoded.reward, decoded.reward_parts) == (1.0, {"exact": 1.0})
    assert type(decoded.reward) is float


def test_joined_spans_of_one_version_and_one_fence_become_one() -> None:
    chunk = example_episode().completion
    later = replace(
        chunk,
        versions=(VersionSpan(PolicyVersion(1, 2), 0), VersionSpan(PolicyVersion(1, 3), 2)),
        fences=(FenceRun(9, "host-2", 0),),
    )

    joined = join_completions([chunk, chunk, later])

    assert [(span.version.step, span.start) for span in joined.versions] == [(2, 0), (3, 10)]
    assert [(run.fence, run.start) for run in joined.fences] == [(5, 0), (9, 8)]
    assert join_completions([]).token_ids.size == 0


def test_chunks_of_a_lost_lease_cannot_be_joined() -> None:
    chunk = example_episode().completion
    older = replace(chunk, fences=(FenceRun(4, "host-0", 0),))

    with pytest.raises(RecordError, match="fences must never decrease, got 5 then 4"):
        join_completions([chunk, older])


def _damage(change: Callable[[dict[str, Any]], object], record: bytes = RECORD) -> bytes:
    fields = msgpack.unpackb(record)
    change(fields)
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)
    return packed


def _in_completion(**changes: object) -> bytes:
    return _damage(lambda fields: fields["completion"].update(changes))


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (b"", "0 bytes"),
        (RECORD[:-1], "complete msgpack"),
        (RECORD + b"\x00", "one msgpack map, got 2"),
        (RECORD + b"\xc1", "complete msgpack"),
        (b"\x90", "must be a map"),
        (b"\xdd\xff\xff\xff\xff", "complete msgpack"),
        (b"\xc6\xff\xff\xff\xff", "complete msgpack"),
        (b"\x91" * 5000, "complete msgpack"),
        (_damage(lambda f: f.pop("reward")), "must be a map of"),
        (_damage(lambda f: f.update(extra=1)), "must be a map of"),
        (_damage(lambda f: f.update(schema=2)), "schema must be 1, got 2"),
        (_damage(lambda f: f.update(schema=True)), "schema must be 1"),
        (_damage(lambda f: f.update(task_id=-1)), "task_id must be an integer"),
        (_damage(lambda f: f.update(task_id=2**60)), "task_id must be an integer"),
        (_damage(lambda f: f.update(group_id=1.0)), "group_id must be an integer"),
        (_damage(lambda f: f.update(purpose="test")), "purpose must be one of"),
        (_damage(lambda f: f.update(purpose=["train"])), "purpose must be one of"),
        (_damage(lambda f: f.update(finish="abort")), "finish_reason must be one of"),
        (_damage(lambda f: f.update(reward=math.nan)), "reward must be a finite float, got nan"),
        (_damage(lambda f: f.update(reward=math.inf)), "reward must be a finite float"),
        (_damage(lambda f: f.update(reward=1)), "reward must be a finite float"),
        (_damage(lambda f: f.update(parts={"a": math.nan})), "reward_parts.a must be a finite"),
        (_damage(lambda f: f.update(parts=[1.0])), "reward_parts must be a map"),
        (_damage(lambda f: f.update(metrics={"a": "b"})), "environment_metrics.a must be"),
        (_damage(lambda f: f.update(metrics={str(i): 0.0 for i in range(300)})), "at most 256"),
        (_damage(lambda f: f.update(text={"a": "b" * 70000})), "metadata.a must be text"),
        (_damage(lambda f: f.update(text={"a": 1})), "metadata.a must be text"),
        (_damage(lambda f: f.update(inc=b"x")), "incarnation must be text"),
        (_damage(lambda f: f.update(started=None)), "started_at must be a finite"),
        (_damage(lambda f: f.update(prompt=b"\x00" * 5)), "prompt must be bytes in multiples of 4"),
        (_damage(lambda f: f.update(prompt=[1, 2])), "prompt must be bytes"),
        (_damage(lambda f: f.update(prompt=b"")), "prompt_ids must not be empty"),
        (_damage(lambda f: f.update(prompt=b"\xff" * 4)), "prompt_ids must be >= 0, got -1"),
        (_damage(lambda f: f.update(completion=None)), "must be a map of"),
        (_in_completion(tokens=b"\x00" * 20), "one value per token = 5, got 4"),
        (_in_completion(tokens=b"\x00" * 18), "tokens must be bytes in multiples of 4"),
        (_in_completion(tokens=b"", logprobs=b"", mask=b"", versions=[], fences=[]), "nothing"),
        (_in_completion(logprobs=_floats(-1, -1, -1)), "one value per token = 4, got 3"),
        (_in_completion(logprobs=_floats(-1, math.nan, -1, 0)), "finite and <= 0"),
        (_in_completion(logprobs=_floats(-1, -math.inf, -1, 0)), "finite and <= 0"),
        (_in_completion(logprobs=_floats(-1, 0.5, -1, 0)), "finite and <= 0"),
        (_in_completion(mask=b"\x01\x01\x02\x01"), "loss_mask must be 0 or 1, got 2"),
        (_in_completion(mask=b"\x01\x01\x00\x01"), "0 where loss_mask is 0"),
        (_in_completion(versions=[]), "versions must cover 4 tokens"),
        (_in_completion(versions=[[1, 2, 1]]), "versions.start must ascend from 0"),
        (_in_completion(versions=[[1, 2, 0], [1, 3, 0]]), "versions.start must ascend"),
        (_in_completion(versions=[[1, 2, 0], [1, 3, 3], [1, 4, 2]]), "versions.start must ascend"),
        (_in_completion(versions=[[1, 2, 0], [1, 3, 4]]), "stay below 4"),
        (_in_completion(versions=[[1, 2, 0]] * 5), "versions must cover"),
        (_in_completion(versions=[[1, 2]]), "versions must be a list of triples"),
        (_in_completion(versions=[["1", 2, 0]]), "versions.lineage must be an integer"),
        (_in_completion(versions=[[1, -2, 0]]), "versions.step must be an integer"),
        (_in_completion(versions=[[1, 2, None]]), "versions.start must be an integer"),
        (_in_completion(fences=[[5, "a", 0], [4, "b", 2]]), "fences must never decrease"),
        (_in_completion(fences=[[5, 7, 0]]), "fences.incarnation must be text"),
        (_in_completion(fences={}), "fences must be a list of triples"),
    ],
)
def test_a_malformed_record_is_refused_by_name(record: bytes, text: str) -> None:
    with pytest.raises(RecordError, match=text):
        validate(record)


def test_a_record_over_the_cap_is_refused_on_both_sides() -> None:
    big = example_episode(tokens=2000)

    with pytest.raises(RecordError, match="at most 4096 bytes"):
        encode_episode(big, max_bytes=4096)
    with pytest.raises(RecordError, match="at most 4096 bytes"):
        decode_episode(encode_episode(big), max_bytes=4096)
    with pytest.raises(RecordError, match="raise buffer"):
        decode_completion(b"\x00" * (MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt_ids": np.zeros(3, np.int64)}, "prompt_ids must be a flat int32 array"),
        ({"prompt_ids": np.zeros((3, 1), np.int32)}, "prompt_ids must be a flat int32 array"),
        ({"prompt_ids": [1, 2]}, "prompt_ids must be a flat int32 array, got list"),
        ({"reward": float("nan")}, "reward must be a finite float"),
        ({"reward": True}, "reward must be a finite float"),
        ({"reward": 10**400}, "reward must be a finite float"),
        ({"reward_parts": {"exact": None}}, "reward_parts.exact must be a finite float"),
        ({"task_id": "3"}, "task_id must be an integer"),
        ({"metadata": {"a": "\ud800"}}, "valid Unicode"),
    ],
)
def test_a_malformed_episode_is_not_encoded(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecordError, match=text):
        encode_episode(replace(example_episode(), **change))


def _decodes_or_refuses(decode: Callable[[bytes], object], record: bytes) -> None:
    """Whatever the bytes, the only error is RecordError."""
    try:
        decoded = decode(record)
    except RecordError:
        return
    assert isinstance(decoded, Episode | Completion)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(record: bytes) -> None:
    _decodes_or_refuses(decode_episode, record)
    _decodes_or_refuses(decode_completion, record)


@settings(max_examples=200)
@given(st.data())
def test_flipped_and_cut_bytes_raise_nothing_else(data: st.DataObject) -> None:
    record = bytearray(data.draw(st.sampled_from([RECORD, CHUNK])))
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    del record[data.draw(st.integers(0, len(record))) :]

    _decodes_or_refuses(decode_episode, bytes(record))
    _decodes_or_refuses(decode_completion, bytes(record))


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.data(), _values)
def test_a_field_of_another_type_raises_nothing_else(data: st.DataObject, value: object) -> None:
    fields = msgpack.unpackb(RECORD)
    inside = fields["completion"] if data.draw(st.booleans()) else fields
    inside[data.draw(st.sampled_from(sorted(inside)))] = value
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)

    _decodes_or_refuses(decode_episode, packed)
