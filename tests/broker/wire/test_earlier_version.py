"""A wire version can serve the one before; older ones are refused.

Today none is served, so the tables of what a version has added are made here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgpack
import pytest
import zmq.asyncio
from msgspec import Meta
from msgspec.msgpack import Decoder

from broker.protocol import codec
from broker.protocol.codec import OLDEST_VERSION, WIRE_VERSION, Envelope, decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    LeaseRequest,
    Verdicts,
    Welcome,
)
from broker.protocol.weight_messages import Brokers
from broker.server import dispatch
from buffer.operations.run import broker_seen
from configs.errors import RecordError
from tests.broker.support.recorded_frames import KINDS, example, plain, record, recorded
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, ring
from tests.waiting import until

ELSEWHERE = "tcp://127.0.0.1:9"
BEFORE = WIRE_VERSION - 1
ADDED: dict[type, tuple[str, ...]] = {Welcome: ("brokers",), Verdicts: ("brokers",)}


class ServedEnvelope(Envelope, frozen=True, forbid_unknown_fields=True):
    """An envelope of this version or of the one before."""

    v: Annotated[int, Meta(ge=BEFORE, le=WIRE_VERSION)]


@pytest.fixture
def serves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this version have added lists of brokers, and serve the one before."""
    monkeypatch.setattr(codec, "ADDED_FIELDS", ADDED)
    monkeypatch.setattr(codec, "ADDED_MESSAGES", (Brokers,))
    monkeypatch.setattr(codec, "OLDEST_VERSION", BEFORE)
    monkeypatch.setattr(codec, "_ENVELOPES", Decoder(ServedEnvelope))
    monkeypatch.setattr(dispatch, "OLDEST_VERSION", BEFORE)


def test_frames_say_here_what_they_said_where_they_were_recorded(tmp_path: Path) -> None:
    """Those of this version, and of each served one before, which was recorded before its end."""
    record(tmp_path)
    served = [recorded(version) for version in range(OLDEST_VERSION, WIRE_VERSION)]

    for frames in (*served, recorded(WIRE_VERSION, tmp_path)):
        for name, (frame, content) in frames.items():
            message = decode(frame, max_bytes=2**20).message
            assert type(message).__name__ == name
            read = plain(message)
            assert {field: read[field] for field in content if field in read} == content


def test_an_answer_to_a_served_version_has_the_fields_that_were_recorded_of_it() -> None:
    for version in range(OLDEST_VERSION, WIRE_VERSION):
        frames = recorded(version)
        for kind in (kind for kind in KINDS if kind.__name__ in frames):
            answer = packed(example(kind), version)
            assert answer.keys() == msgpack.unpackb(frames[kind.__name__][0])["message"].keys()


def packed(message: object, version: int) -> dict[str, Any]:
    frame = msgpack.unpackb(encode(message, run="r", incarnation="a", seq=1, version=version))
    assert frame["v"] == version
    return dict(frame["message"])


@pytest.mark.usefixtures("serves_the_one_before")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_answer_to_the_version_before_is_without_what_was_added(kind: type) -> None:
    message = example(kind)
    if kind is Brokers:
        with pytest.raises(RecordError, match=f"must be one that has Brokers, got {BEFORE}"):
            encode(message, run="r", incarnation="a", seq=1, version=BEFORE)
        return

    answer = packed(message, BEFORE)

    assert packed(message, WIRE_VERSION).keys() - answer.keys() == {*ADDED.get(kind, ())}


async def _ask(socket: zmq.asyncio.Socket, message: object, seq: int) -> tuple[bytes, Any]:
    frame = encode(message, run=RUN, incarnation="actor-1", seq=seq, version=BEFORE)
    await socket.send(frame)
    answer = await asyncio.wait_for(socket.recv(), 10)
    return answer, decode(answer, max_bytes=2**20).message


@pytest.mark.usefixtures("serves_the_one_before")
def test_an_actor_of_the_version_before_works_to_its_end(redis_url: str, keys: Path) -> None:
    async def story(here: Ring) -> None:
        await begin(here.store, groups=2)
        await told_of_brokers(here)
        async with here.raw_socket() as old:
            frames = []
            frame, welcome = await _ask(old, hello("actor-1"), 1)
            assert isinstance(welcome, Welcome)
            frames.append(frame)
            frame, reply = await _ask(old, LeaseRequest(2, FIRST), 2)
            frames.append(frame)
            lease, other = reply.leases
            beats = (Beat(lease.task_id, lease.fence), Beat(other.task_id, other.fence))
            for message in (
                BeatRequest(beats, FIRST),
                submission(lease),
                LeaseRequest(2**40, FIRST),
            ):
                frame, _ = await _ask(old, message, 3)  # the last one is refused
                frames.append(frame)
            frames.append((await _ask(old, Bye(), 4))[0])

            assert {msgpack.unpackb(each)["v"] for each in frames} == {BEFORE}
            assert not any(b"brokers" in each for each in frames)

    asyncio.run(served(story, redis_url, keys))


@pytest.mark.usefixtures("serves_the_one_before")
def test_a_frame_of_an_older_version_is_refused_with_both_that_are_read(
    redis_url: str, keys: Path
) -> None:
    async def story(here: Ring) -> None:
        async with here.raw_socket() as old:
            frame = encode(hello("actor-1"), run=RUN, incarnation="actor-1", seq=1, version=3)
            await old.send(frame)
            refusal: Any = decode(await asyncio.wait_for(old.recv(), 10), max_bytes=2**20).message

        assert refusal.code == "malformed"
        assert f"must be {BEFORE} or {WIRE_VERSION}, got 3; update the older peer" in refusal.text

    asyncio.run(served(story, redis_url, keys))


def test_actors_of_this_version_are_told_of_brokers(redis_url: str, keys: Path) -> None:
    async def story(here: Ring) -> None:
        await begin(here.store, groups=0)

        assert await told_of_brokers(here) == {ELSEWHERE, here.endpoint}

    asyncio.run(served(story, redis_url, keys))


async def told_of_brokers(here: Ring) -> set[str]:
    """Enter another broker into the store, and wait until actors are told."""
    await here.store.run(broker_seen(ELSEWHERE, {"at": 1.0}))
    actor = await here.actor("actor-2")

    async def told() -> set[str]:
        brokers = (await actor.beat(BeatRequest((), FIRST))).brokers
        return set(brokers) if ELSEWHERE in brokers else set()

    return await until(told, "no actor was told")


async def served(
    story: Callable[[Ring], Coroutine[Any, Any, None]], redis_url: str, keys: Path
) -> None:
    async with asyncio.timeout(60), ring(redis_url, keys) as here:
        await story(here)
