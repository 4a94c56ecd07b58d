"""A peer that was let in and sends what it likes: each frame is answered, the store unchanged."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import hypothesis
import pytest
import redis
from hypothesis import strategies as st

from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    FailRequest,
    Failure,
    Figures,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
)
from broker.transport.keys import make_keys
from tests.broker.support.ring import FIRST, RUN, begin, ring
from tests.fuzz.support.lies import lies

pytestmark = pytest.mark.slow

FRAMES = 400
IN_FLIGHT = 20
OTHERS_FENCE = 2**50

REQUESTS = tuple(
    encode(request, run=RUN, incarnation="liar", seq=7)
    for request in (
        LeaseRequest(4, FIRST),
        BeatRequest((Beat(0, OTHERS_FENCE, 0, 1, b"chunk"),), FIRST, Figures(tokens=1.0)),
        SubmitRequest((Submission(0, OTHERS_FENCE, b"record"),)),
        ReleaseRequest(((0, OTHERS_FENCE), (1, 1))),
        FailRequest((Failure(0, OTHERS_FENCE, "data", "bad"),)),
    )
)


def fingerprint(redis_url: str) -> str:
    """Everything in the store but signs of life and the reaper's clock."""
    digest = hashlib.sha256()
    with redis.Redis.from_url(redis_url) as client:
        for key in sorted(client.scan_iter()):
            if key.endswith(b":meta"):
                meta = client.hgetall(key)
                meta.pop(b"reaped_at", None)
                digest.update(repr(sorted(meta.items())).encode())
            elif not key.endswith((b":actors", b":brokers")) and b":a:" not in key:
                digest.update(key + (client.dump(key) or b""))
    return digest.hexdigest()


def frames(seed: int) -> list[bytes]:
    """Lies for one session, the same for the same seed."""
    drawn: list[bytes] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=FRAMES, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(lies(REQUESTS) | st.sampled_from(REQUESTS))
    def draw(frame: bytes) -> None:
        drawn.append(frame)

    draw()
    return drawn


@pytest.mark.parametrize("seed", [1, 2])
def test_lies_are_answered_and_change_nothing(redis_url: str, tmp_path: Path, seed: int) -> None:
    async def story() -> None:
        async with ring(redis_url, make_keys(tmp_path / "keys")) as here:
            await begin(here.store, groups=2)
            holder = await here.actor("holder")
            leases = (await holder.lease(LeaseRequest(4, FIRST))).leases
            assert len(leases) == 4  # nothing is left that a true request could take
            sent = frames(seed)
            async with here.raw_actor("liar") as socket:
                before = fingerprint(redis_url)
                for first in range(0, len(sent), IN_FLIGHT):
                    part = sent[first : first + IN_FLIGHT]
                    for frame in part:
                        await socket.send(frame)
                    for _ in part:
                        reply = await asyncio.wait_for(socket.recv(), 10)
                        decode(reply, max_bytes=2**20)

            assert fingerprint(redis_url) == before
            again = [(lease.task_id, lease.fence) for lease in leases]
            verdicts = await holder.release(ReleaseRequest(tuple(again)))
            assert [verdict.verdict for verdict in verdicts.verdicts] == ["OK"] * 4

    asyncio.run(story())
