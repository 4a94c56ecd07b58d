"""Checks of many records at once: they find what decoding each one finds, no more and no less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.record import summaries, wire
from buffer.record.codec import (
    decode_completion,
    decode_episode,
    encode_completion,
    encode_episode,
)
from buffer.record.episode import Episode
from buffer.record.summaries import summaries_of_chunks, summaries_of_records
from configs.errors import RecordError
from tests.buffer.support.episodes import episodes

MOST = 2**20
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**60),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=9),
    st.lists(st.lists(st.integers(-1, 3), max_size=4), max_size=3),
    st.dictionaries(st.text(max_size=2), st.one_of(st.floats(), st.text()), max_size=2),
)


def _verdict(look: Callable[[], object]) -> object:
    try:
        return look()
    except RecordError as error:
        return str(error)


def _decoded(records: list[bytes]) -> list[int]:
    return [decode_episode(record, max_bytes=MOST).task_id for record in records]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A record with one field that may be odd, or one byte that is another."""
    record = encode_episode(draw(episodes))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(record) - 1))
        return record[:place] + bytes([draw(st.integers(0, 255))]) + record[place + 1 :]
    fields: dict[str, Any] = msgpack.unpackb(record)
    part = fields["completion"] if draw(st.booleans()) else fields
    part[draw(st.sampled_from(sorted(part)))] = draw(ODD)
    return bytes(msgpack.packb(fields))


@pytest.mark.slow
@given(st.lists(st.one_of(episodes.map(encode_episode), damaged()), min_size=1, max_size=4))
def test_many_records_are_judged_as_one_by_one(records: list[bytes]) -> None:
    judged = _verdict(lambda: [s.task_id for s in summaries_of_records(records, max_bytes=MOST)])

    assert judged == _verdict(lambda: _decoded(records))


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """A chunk, or several joined as the store joins them, of which one field may be odd."""
    encoded = [encode_completion(e.completion) for e in draw(st.lists(episodes, max_size=2))]
    if not encoded or draw(st.booleans()):
        return b"".join(encoded)
    fields: dict[str, Any] = msgpack.unpackb(encoded[0])
    fields[draw(st.sampled_from(sorted(fields)))] = draw(ODD)
    return bytes(msgpack.packb(fields))


@pytest.mark.slow
@given(st.lists(chunks(), min_size=1, max_size=4))
def test_many_chunks_are_judged_as_one_by_one(several: list[bytes]) -> None:
    judged = _verdict(lambda: [s.length for s in summaries_of_chunks(several, max_bytes=MOST)])

    assert judged == _verdict(
        lambda: [decode_completion(chunk, max_bytes=MOST).token_ids.size for chunk in several]
    )


def _with_numbers(**arrays: np.ndarray) -> bytes:
    fields: dict[str, Any] = {
        "schema": 1,
        "tokens": np.arange(4, dtype="<i4").tobytes(),
        "logprobs": np.full(4, -1, "<f4").tobytes(),
        "mask": np.ones(4, "u1").tobytes(),
        "versions": [[1, 0, 0], [1, 1, 2]],
        "fences": [[7, "a", 0]],
    }
    record: dict[str, Any] = {
        "schema": 1, "task_id": 5, "group_id": 1, "purpose": "train",
        "prompt": np.arange(3, dtype="<i4").tobytes(), "completion": fields, "reward": 1.0,
        "parts": {"exact": 1.0}, "finish": "stop", "metrics": {}, "inc": "a", "started": 1.0,
        "finished": 2.0, "text": {"answer": "x"},
    }  # fmt: skip
    for name, array in arrays.items():
        (record if name == "prompt" else fields)[name] = array.tobytes()
    return bytes(msgpack.packb(record))


MIXED = np.array([1, 0, 1, 0], "u1")


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"tokens": np.array([1, -1, 2, 3], "<i4")}, "token_ids must be >= 0"),
        ({"prompt": np.array([-5], "<i4")}, "prompt_ids must be >= 0"),
        ({"logprobs": np.array([-1, np.nan, -1, -1], "<f4")}, "behaviour_logprobs must be finite"),
        ({"logprobs": np.array([-1, 0.5, -1, -1], "<f4")}, "behaviour_logprobs must be finite"),
        ({"logprobs": np.array([-1, -np.inf, -1, -1], "<f4")}, "behaviour_logprobs must be finite"),
        ({"mask": np.array([1, 2, 1, 1], "u1")}, "loss_mask must be 0 or 1"),
        ({"mask": MIXED}, "behaviour_logprobs must be 0 where loss_mask is 0"),
    ],
)
def test_bad_numbers_among_good_records_are_named(
    arrays: dict[str, np.ndarray], reason: str
) -> None:
    good, bad = _with_numbers(), _with_numbers(**arrays)

    assert [s.task_id for s in summaries_of_records([good, good], max_bytes=MOST)] == [5, 5]
    with pytest.raises(RecordError, match=reason):
        summaries_of_records([good, bad, good], max_bytes=MOST)


def test_tokens_of_the_environment_pass_with_a_logprob_of_0() -> None:
    spoken = _with_numbers(mask=MIXED, logprobs=np.array([-1, 0, -1, 0], "<f4"))

    assert summaries_of_records([spoken], max_bytes=MOST)[0].task_id == 5
    assert decode_episode(spoken).task_id == 5


@pytest.mark.slow
@given(st.lists(episodes, min_size=1, max_size=4))
def test_a_summary_has_the_versions_and_fences_of_the_tokens(made: list[Episode]) -> None:
    found = summaries_of_records([encode_episode(episode) for episode in made], max_bytes=MOST)

    for episode, summary in zip(made, found, strict=True):
        completion = episode.completion
        versions = [(span.version.lineage, span.version.step) for span in completion.versions]
        fences = [run.fence for run in completion.fences]
        assert summary == (
            episode.task_id,
            completion.token_ids.size,
            max(versions),
            min(versions),
            fences[0],
            fences[-1],
            completion.teacher_logprobs is not None,
        )


def test_a_record_that_is_too_long_is_refused() -> None:
    record = _with_numbers()

    with pytest.raises(RecordError, match=f"at most {len(record) - 1} bytes"):
        summaries_of_records([record], max_bytes=len(record) - 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", True),
        ("task_id", -1),
        ("task_id", True),
        ("group_id", 2**53),
        ("purpose", "test"),
        ("finish", "tired"),
        ("prompt", b""),
        ("reward", 1),
        ("started", float("nan")),
        ("finished", None),
        ("inc", "a" * 257),
        ("parts", {"exact": 1}),
        ("metrics", {"x": float("inf")}),
        ("text", {"x": 1}),
        ("text", {f"x{i}": "" for i in range(257)}),
        ("tokens", b"123"),
        ("mask", b"\1\1\1"),
        ("versions", []),
        ("versions", [[1, 0, 1]]),
        ("versions", [[1, 0, 0], [1, 1, 0]]),
        ("versions", [[1, 0, 0], [1, 1, 4]]),
        ("versions", [[1, -1, 0]]),
        ("versions", [["1", 1, 0]]),
        ("fences", [[7, 8, 0]]),
        ("fences", [[7, "a", 0], [6, "a", 2]]),
        ("fences", [[None, "a", 0]]),
    ],
)
def test_a_field_that_is_not_right_is_named_as_by_the_decoder(name: str, value: object) -> None:
    fields: dict[str, Any] = msgpack.unpackb(_with_numbers())
    (fields if name in fields else fields["completion"])[name] = value
    record = bytes(msgpack.packb(fields))

    with pytest.raises(RecordError) as decoding:
        decode_episode(record)
    with pytest.raises(RecordError) as looking:
        summaries_of_records([_with_numbers(), record], max_bytes=MOST)

    assert str(looking.value) == str(decoding.value)


def test_a_name_that_comes_twice_hides_nothing() -> None:
    record = _with_numbers()
    twice = b"\x8f" + msgpack.packb("reward") + msgpack.packb({1: 1.0}) + record[1:]

    assert record[0] == 0x8E, "a map of 14"
    for look in (decode_episode, lambda bad: summaries_of_records([bad], max_bytes=MOST)):
        with pytest.raises(RecordError):
            look(twice)


class _Counting:
    """A decoder that counts how often each record is read."""

    def __init__(self, decoder: Any, reads: list[bytes]) -> None:
        self.type = decoder.type
        self._decoder = decoder
        self._reads = reads

    def decode(self, record: bytes) -> object:
        self._reads.append(record)
        return self._decoder.decode(record)


def _bad_numbers() -> bytes:
    return _with_numbers(tokens=np.array([1, -1, 2, 3], "<i4"))


def _without_reward() -> bytes:
    fields = msgpack.unpackb(_with_numbers())
    fields["reward"] = None
    return bytes(msgpack.packb(fields))


@pytest.mark.parametrize("bad", [_bad_numbers(), _without_reward(), b"\xc1"])
def test_a_refused_record_and_those_beside_it_are_read_once(
    bad: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[bytes] = []
    monkeypatch.setattr(summaries, "EPISODE", _Counting(wire.EPISODE, reads))
    records = [_with_numbers(), _with_numbers(), bad]

    with pytest.raises(RecordError):
        summaries_of_records(records, max_bytes=MOST)

    assert reads == records


def test_a_refused_chunk_is_read_once_and_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bytes] = []
    unpacked: list[int] = []
    unpacker = msgpack.Unpacker

    def counted(**options: Any) -> object:
        unpacked.append(options["max_buffer_size"])
        return unpacker(**options)

    monkeypatch.setattr(summaries, "COMPLETION", _Counting(wire.COMPLETION, reads))
    monkeypatch.setattr(msgpack, "Unpacker", counted)
    good = bytes(msgpack.packb(msgpack.unpackb(_with_numbers())["completion"]))
    bad = bytes(msgpack.packb({**msgpack.unpackb(good), "mask": 1}))

    with pytest.raises(RecordError, match="loss_mask must be bytes, got 1"):
        summaries_of_chunks([good, bad], max_bytes=MOST)

    assert (reads, unpacked) == ([good, bad], [len(bad)])


def test_the_first_bad_record_is_named() -> None:
    with pytest.raises(RecordError, match="token_ids must be >= 0, got -1"):
        summaries_of_records([_bad_numbers(), _without_reward()], max_bytes=MOST)
    with pytest.raises(RecordError, match="reward must be a finite float, got None"):
        summaries_of_records([_without_reward(), _bad_numbers()], max_bytes=MOST)
