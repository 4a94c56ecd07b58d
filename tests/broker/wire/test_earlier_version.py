"""Actors of the wire version before are served until they leave; older ones are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq.asyncio

from broker.protocol.codec import OLDEST_VERSION, WIRE_VERSION, decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    LeaseRequest,
    Welcome,
)
from buffer.operations.run import broker_seen
from configs.errors import RecordError
from tests.broker.support.recorded_frames import KINDS, example, plain, recorded
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, ring

ELSEWHERE = "tcp://127.0.0.1:9"
BEFORE = recorded(OLDEST_VERSION)


def fields_of(frame: bytes) -> set[str]:
    return set(msgpack.unpackb(frame)["message"])


def test_frames_of_the_version_before_were_recorded() -> None:
    """A new wire version needs them: `python -m tests.broker.support.recorded_frames` first."""
    assert {msgpack.unpackb(frame)["v"] for frame, _ in BEFORE.values()} == {OLDEST_VERSION}
    assert OLDEST_VERSION == WIRE_VERSION - 1


@pytest.mark.parametrize("name", BEFORE)
def test_a_frame_of_the_version_before_says_here_what_it_said_there(name: str) -> None:
    frame, content = BEFORE[name]

    envelope = decode(frame, max_bytes=2**20)

    assert (envelope.v, type(envelope.message).__name__) == (OLDEST_VERSION, name)
    read = plain(envelope.message)
    assert {field: read[field] for field in content if field in read} == content


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_answer_to_the_version_before_has_only_what_that_one_reads(kind: type) -> None:
    message = example(kind)
    if kind.__name__ not in BEFORE:
        with pytest.raises(RecordError, match=f"wire version {OLDEST_VERSION} must have"):
            encode(message, run="r", incarnation="a", seq=1, version=OLDEST_VERSION)
        return

    frame = encode(message, run="r", incarnation="a", seq=1, version=OLDEST_VERSION)

    packed, there = msgpack.unpackb(frame), msgpack.unpackb(BEFORE[kind.__name__][0])
    assert packed["v"] == OLDEST_VERSION
    assert _shape(packed["message"]) == _shape(there["message"])


def _shape(value: Any) -> Any:
    """Names of a value's fields, and lengths of what has none."""
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items()}
    return [_shape(each) for each in value] if isinstance(value, list) else type(value).__name__


async def _ask(socket: zmq.asyncio.Socket, message: object, seq: int) -> tuple[bytes, Any]:
    frame = encode(message, run=RUN, incarnation="actor-1", seq=seq, version=OLDEST_VERSION)
    await socket.send(frame)
    answer = await asyncio.wait_for(socket.recv(), 10)
    return answer, decode(answer, max_bytes=2**20).message


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

            assert {msgpack.unpackb(each)["v"] for each in frames} == {OLDEST_VERSION}
            assert not any(b"brokers" in each for each in frames)

    asyncio.run(served(story, redis_url, keys))


def test_a_frame_of_an_older_version_is_refused_with_both_that_are_read(
    redis_url: str, keys: Path
) -> None:
    async def story(here: Ring) -> None:
        async with here.raw_socket() as old:
            frame, _ = BEFORE["Hello"]
            await old.send(frame.replace(b"\xa1v\x04", b"\xa1v\x03"))
            refusal: Any = decode(await asyncio.wait_for(old.recv(), 10), max_bytes=2**20).message

        assert refusal.code == "malformed"
        assert f"must be {OLDEST_VERSION} or {WIRE_VERSION}, got 3; both ends" in refusal.text

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
    for _ in range(100):
        brokers = (await actor.beat(BeatRequest((), FIRST))).brokers
        if ELSEWHERE in brokers:
            return set(brokers)
        await asyncio.sleep(0.1)
    raise AssertionError("no actor was told")


async def served(
    story: Callable[[Ring], Coroutine[Any, Any, None]], redis_url: str, keys: Path
) -> None:
    async with asyncio.timeout(60), ring(redis_url, keys) as here:
        await story(here)
