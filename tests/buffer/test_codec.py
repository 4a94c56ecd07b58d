"""Records: the same bytes back, and RecordError for everything that is not one."""

from __future__ import annotations

import base64
import enum
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
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
)
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.errors import RecordError
from tests.buffer.support.episodes import completions, episodes, example_episode

RECORD = encode_episode(example_episode())
CHUNK = encode_completion(example_episode().completion)

WRITTEN_BY_MSGPACK = base64.b85decode(
    "j;3>CXk~3-0jG3fb8BB|WX=Eq5pbwya&L8TUuk5|0000200000r*L(0aBp*Eq-AztY^HE>Z*6dN#0&ud0077U003"
    "|i0RXCFZ*6dFWprt8Zic3FV`yb<VF9LeZ);_4bHoe<0000i0RRC1|NnoeY;R|9a&KaD#0&rc0KWhL000005Wu8uV"
    "RLK50|5X5sCH#?b7^mGbCQz*%*X(f0nEt)re<YsV`X!alg|JI00000005?FZ*z1lF#wa#00aO400001r)a~pbY(3"
    "v0j6?gcVTj5%Rjl9nVFfHnx$}Ia&&WnrDb?wV|2^E@Bjb+0001{W@&C|b7-"
    "q&Zgy#MZ*Fa6Zgi(@Wpr|BV{?F`X>MbuXv4I0Wi2wNb97;HbY*1ALE6%EfB*mhsAg$yX>(|0WXnO?(sY0z005+PW"
    "q5RfreSV#cV%+fD0p~yczAetczAetczAetczAetczAetczAetczAetczAetczAetcm"
)
"""A record from before msgspec wrote them."""


@given(episodes)
def test_an_episode_comes_back_byte_for_byte(episode: Episode) -> None:
    record = encode_episode(episode)

    decoded = decode_episode(record)

    assert encode_episode(decoded) == record
    assert decoded.completion.versions == episode.completion.versions
    assert decoded.completion.fences == episode.completion.fences
    assert decoded.completion.branches == episode.completion.branches
    assert decoded.completion.attachments == episode.completion.attachments
    assert (decoded.turn_rewards, decoded.messages) == (episode.turn_rewards, episode.messages)
    assert decoded.prompt_attachments == episode.prompt_attachments
    for array, other in (
        (decoded.prompt_ids, episode.prompt_ids),
        (decoded.completion.token_ids, episode.completion.token_ids),
        (decoded.completion.behaviour_logprobs, episode.completion.behaviour_logprobs),
        (decoded.completion.loss_mask, episode.completion.loss_mask),
        (decoded.completion.experts, episode.completion.experts),
        (decoded.completion.support_sizes, episode.completion.support_sizes),
        (decoded.completion.support_ids, episode.completion.support_ids),
        (decoded.completion.teacher_logprobs, episode.completion.teacher_logprobs),
        (decoded.prompt_experts, episode.prompt_experts),
    ):
        if array is None or other is None:
            assert array is other
            continue
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes()
    assert (decoded.reward, decoded.metadata) == (episode.reward, episode.metadata)
    assert decoded.reward_parts == episode.reward_parts


def test_a_record_of_schema_1_is_read_and_written_again_to_the_byte() -> None:
    """A run that newer code resumes has such records, and peers may still be of older code."""
    episode = decode_episode(WRITTEN_BY_MSGPACK)

    assert WRITTEN_BY_MSGPACK.count(b"\xa6schema\x01") == 2
    assert encode_episode(episode) == WRITTEN_BY_MSGPACK
    assert (episode.task_id, episode.group_id, episode.purpose) == (70_000, 2**33, "eval")
    assert episode.prompt_ids.tolist() == [1, 200, 70_000]
    assert episode.completion.token_ids.tolist() == [5, 300, 2**31 - 1]
    assert episode.completion.behaviour_logprobs.tolist() == [-0.5, 0.0, -2.25]
    assert episode.completion.loss_mask.tolist() == [1, 0, 1]
    assert episode.completion.versions == (
        VersionSpan(PolicyVersion(1, 200), 0),
        VersionSpan(PolicyVersion(1, 201), 2),
    )
    assert episode.completion.fences == (
        FenceRun(2**50, "host-1", 0),
        FenceRun(2**50 + 1, "hôte-2", 1),
    )
    assert (episode.reward, episode.reward_parts) == (0.1, {"exact": -1.0})
    assert (episode.finish_reason, episode.incarnation) == ("environment", "hôte-2")
    assert (episode.started_at, episode.finished_at) == (1.8e9, 1.8e9 + 0.5)
    assert (episode.environment_metrics, episode.metadata) == ({}, {"answer": "x" * 40})


@given(episodes)
def test_msgspec_writes_what_msgpack_would(episode: Episode) -> None:
    record = encode_episode(episode)

    assert msgpack.packb(msgpack.unpackb(record)) == record


def _as_recorded_in(first: Completion, second: Completion) -> Completion:
    """Make the second chunk have values for each token where the first has them, and no others."""
    tokens = len(second.token_ids)
    experts, sizes = None, None
    if first.experts is not None and tokens:
        experts = np.zeros((tokens, first.experts.shape[1]), np.uint8)
    elif not len(first.token_ids):
        experts = second.experts
    sizes, ids = second.support_sizes, second.support_ids
    if len(first.token_ids):
        has_sizes = first.support_sizes is not None and tokens
        sizes = np.zeros(tokens, np.int32) if has_sizes else None
        ids = np.zeros(0, np.int32) if has_sizes else None
    scores = second.teacher_logprobs
    if len(first.token_ids):
        has_scores = first.teacher_logprobs is not None and tokens
        scores = np.zeros(tokens, np.float32) if has_scores else None
    return replace(
        second, experts=experts, support_sizes=sizes, support_ids=ids, teacher_logprobs=scores
    )


@pytest.mark.slow
@given(completions(), completions())
def test_joined_chunks_are_the_completion(first: Completion, second: Completion) -> None:
    shifted = replace(second, fences=tuple(replace(run, fence=2**53 - 1) for run in second.fences))

    shifted = _as_recorded_in(first, shifted)

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
        (_damage(lambda f: f.pop("parts")), r"must be a map with .* without \['reward_parts'\]"),
        (_damage(lambda f: f.pop("reward")), "must be a map with"),
        (_damage(lambda f: f.update(extra=1)), r"must be a map with .* got also \['extra'\]"),
        (_damage(lambda f: f.update(schema=3)), "schema must be 1 to 2, got 3"),
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
        (_damage(lambda f: f.update(metrics={str(i): 0.0 for i in range(300)})), "at most 64"),
        (_damage(lambda f: f.update(text={"a": "b" * 70000})), "metadata.a must be .* shorten it"),
        (_damage(lambda f: f.update(text={"a": 1})), "metadata.a must be text"),
        (_damage(lambda f: f.update(inc=b"x")), "incarnation must be text"),
        (_damage(lambda f: f.update(started=None)), "started_at must be a finite"),
        (
            _damage(lambda f: f.update(prompt=b"\x00" * 5)),
            "prompt_ids must be bytes in multiples of 4",
        ),
        (_damage(lambda f: f.update(prompt=[1, 2])), "prompt_ids must be bytes"),
        (_damage(lambda f: f.update(prompt=b"")), "prompt_ids must not be empty"),
        (_damage(lambda f: f.update(prompt=b"\xff" * 4)), "prompt_ids must be >= 0, got -1"),
        (_damage(lambda f: f.update(completion=None)), "completion must be a map .* no map"),
        (_in_completion(tokens=b"\x00" * 20), "one value per token = 5, got 4"),
        (_in_completion(tokens=b"\x00" * 18), "token_ids must be bytes in multiples of 4"),
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
        decode_episode(record)


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
        ({"metadata": {"a": "\ud800"}}, "metadata.a must be valid Unicode"),
    ],
)
def test_a_malformed_episode_is_not_encoded(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecordError, match=text):
        encode_episode(replace(example_episode(), **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"reward_parts": {"exact": None}}, "reward_parts.exact must be a finite float, got None"),
        ({"reward": np.float64("nan")}, r"reward must be a finite float, got .*nan"),
        ({"reward": 2**60}, "reward must be a finite float, got 1152921504606846976"),
        ({"reward": np.float64(1e16)}, r"reward must be a finite float, got .*1e\+16"),
        ({"metadata": {"a": 1}}, "metadata.a must be text of at most 65536 characters, got 1$"),
        ({"finish_reason": "abort"}, "finish_reason must be one of .*, got 'abort'"),
    ],
)
def test_a_refusal_quotes_the_value_at_fault(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecordError, match=text):
        encode_episode(replace(example_episode(), **change))


def test_a_refusal_of_a_long_value_is_short() -> None:
    with pytest.raises(RecordError, match="must be one of train, eval, got 'aaa") as refused:
        decode_episode(_damage(lambda f: f.update(purpose="a" * 10**6)))
    assert len(str(refused.value)) < 200

    with pytest.raises(RecordError, match=r"metadata\.a{71} must be text") as refused:
        decode_episode(_damage(lambda f: f.update(text={"a" * 100: [b"x" * 10**6]})))
    assert len(str(refused.value)) < 300


class _Letter(enum.Enum):
    A = "a"
    TRAIN = "train"


class _One(enum.IntEnum):
    ONE = 1


@dataclass
class _Texts:
    answer: str = "a"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"metadata": {"a": Decimal("1.5")}}, r"metadata.a must be text .* got Decimal\('1.5'\)"),
        ({"metadata": {"a": uuid.UUID(int=1)}}, r"metadata.a must be text .* got UUID"),
        ({"metadata": {"a": date(2026, 1, 2)}}, r"metadata.a must be text .* got datetime.date"),
        ({"metadata": {"a": _Letter.A}}, r"metadata.a must be text .* got <_Letter.A: 'a'>"),
        ({"metadata": {_Letter.A: "a"}}, r"key of metadata must be text .* got <_Letter.A"),
        ({"metadata": _Texts()}, "metadata must be a map of at most 64 entries, got _Texts"),
        ({"incarnation": uuid.UUID(int=1)}, "incarnation must be text .* got UUID"),
        ({"reward_parts": {_Letter.A: 1.0}}, "key of reward_parts must be text"),
        ({"started_at": _One.ONE}, "started_at must be a finite float"),
        ({"task_id": _One.ONE}, "task_id must be an integer"),
        ({"purpose": _Letter.TRAIN}, "purpose must be one of train, eval"),
    ],
)
def test_no_value_is_written_as_another(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecordError, match=text):
        encode_episode(replace(example_episode(), **change))


def _nested(levels: int = 10**5) -> object:
    value: object = None
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"metadata": {"a": _nested()}}, "metadata.a must be text"),
        ({"metadata": {"a": object()}}, "metadata.a must be text"),
        ({"metadata": None}, "metadata must be a map"),
        ({"task_id": 2**70}, "task_id must be an integer"),
        ({"task_id": 10**5000}, "task_id must be an integer .* got <?int"),
        ({"group_id": np.int64(3)}, "group_id must be an integer"),
        ({"reward_parts": None}, "reward_parts must be a map"),
        ({"environment_metrics": [1.0]}, "environment_metrics must be a map"),
        ({"reward": 10**5000}, "reward must be a finite float, got <?int"),
        ({"completion": None}, "completion must be a Completion, got None"),
    ],
)
def test_an_odd_episode_is_refused_and_raises_nothing_else(
    change: dict[str, Any], text: str
) -> None:
    with pytest.raises(RecordError, match=text):
        encode_episode(replace(example_episode(), **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"versions": None}, "completion.versions must be VersionSpans"),
        ({"versions": (None,)}, r"completion.versions must be VersionSpans.* got \(None,\)"),
        ({"versions": (VersionSpan(None, 0),)}, "completion.versions must be VersionSpans"),  # type: ignore[arg-type]
        ({"versions": (VersionSpan(PolicyVersion(1, _One.ONE), 0),)}, "versions.step must be an"),
        ({"fences": ((5, "host-1", 0),)}, "completion.fences FenceRuns"),
        ({"fences": 7}, "completion.fences FenceRuns"),
        ({"fences": (FenceRun(5, uuid.UUID(int=1), 0),)}, "fences.incarnation must be text"),  # type: ignore[arg-type]
        ({"fences": (FenceRun(_One.ONE, "a", 0),)}, "fences.fence must be an integer"),
    ],
)
def test_odd_spans_are_refused_and_raise_nothing_else(change: dict[str, Any], text: str) -> None:
    completion = replace(example_episode().completion, **change)

    with pytest.raises(RecordError, match=text):
        encode_completion(completion)
    with pytest.raises(RecordError, match=text):
        encode_episode(replace(example_episode(), completion=completion))


def _decodes_or_refuses(decode: Callable[[bytes], object], record: bytes) -> None:
    """Whatever the bytes, the only error is RecordError; what is read, msgpack reads as well."""
    try:
        decoded = decode(record)
    except RecordError:
        return
    assert isinstance(decoded, Episode | Completion)
    if isinstance(decoded, Episode):
        fields = msgpack.unpackb(record, strict_map_key=True)
        assert msgpack.unpackb(encode_episode(decoded)) == fields


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


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data(), _values)
def test_a_field_of_another_type_raises_nothing_else(data: st.DataObject, value: object) -> None:
    fields = msgpack.unpackb(RECORD)
    inside = fields["completion"] if data.draw(st.booleans()) else fields
    inside[data.draw(st.sampled_from(sorted(inside)))] = value
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)

    _decodes_or_refuses(decode_episode, packed)
