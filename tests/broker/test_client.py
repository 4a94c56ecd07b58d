"""The client under slow, lost, oversized and missing replies."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from broker import connection
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
    Verdict,
)
from buffer import operations
from buffer.operations.operation import Operation
from buffer.record.codec import encode_completion
from buffer.store import AsyncStore
from configs.errors import DeadlineError, RecordError, RefusedError
from console.run.redis_server import free_port
from tests.broker.support.records import completion
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, ring, until_stats


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def test_without_a_broker_a_call_ends_at_its_deadline_with_what_to_check(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        nobody = Ring(store, f"tcp://127.0.0.1:{free_port()}", keys)
        client = nobody.client()
        started = time.monotonic()

        with pytest.raises(
            DeadlineError, match=r"Hello must be answered within 0\.5 s.*broker runs"
        ):
            await client.hello(hello("actor-1"), deadline_s=0.5)
        assert time.monotonic() - started < 2
        await nobody.close()

    asyncio.run(story())


def test_a_call_of_a_closed_client_is_refused_and_begins_nothing(keys: Path) -> None:
    async def story() -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        client = Ring(AsyncStore("redis://localhost:1", RUN), "tcp://127.0.0.1:1", keys).client()
        with pytest.raises(DeadlineError):
            await client.hello(hello("actor-1"), deadline_s=0.1)
        await client.close()
        before = asyncio.all_tasks()

        # Such as a HELLO that is repeated, or leases given back, after a pause.
        with pytest.raises(RefusedError, match="the client is closed"):
            await client.hello(hello("actor-1"), deadline_s=1)

        assert asyncio.all_tasks() == before
        gc.collect()  # where a task has failed unseen, it is told now
        assert errors == []

    asyncio.run(story())


def test_a_broker_that_never_answers_is_named_with_what_to_check(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "UNANSWERED_S", 0.05)
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def story() -> None:
        client = Ring(AsyncStore(redis_url, RUN), endpoint, keys).client()
        with pytest.raises(DeadlineError):
            await client.hello(hello("actor-1"), deadline_s=0.5)
        await client.close()

    with capture_logs() as lines:
        asyncio.run(story())

    (warning,) = [line for line in lines if line["event"] == "no answer from the broker yet"]
    assert warning["broker"] == f"{endpoint} (no connection yet)"


def test_a_broker_that_answers_is_not_waited_for(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "UNANSWERED_S", 0.5)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            await here.actor()
            await asyncio.sleep(0.6)

    with capture_logs() as lines:
        asyncio.run(story())

    assert not [line for line in lines if line["event"] == "no answer from the broker yet"]


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()

            with pytest.raises(RecordError, match=r"broker.max_message_bytes = 1048576, got 20"):
                await actor.submit(SubmitRequest((Submission(0, 1, bytes(2 * 2**20)),)))

    asyncio.run(story())


def test_many_calls_in_flight_each_get_their_own_answer(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            asked = [actor.release(ReleaseRequest(((n, 1),))) for n in range(2, 302)]

            answers = await asyncio.gather(*asked)

            assert [answer.verdicts[0].task_id for answer in answers] == list(range(2, 302))
            assert {answer.verdicts[0].verdict for answer in answers} == {Verdict.GONE}

    asyncio.run(story())


def test_a_resent_lease_request_is_granted_once(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=4)
            request = encode(LeaseRequest(2, FIRST), run=RUN, incarnation="actor-1", seq=9)

            replies = []
            async with here.raw_actor() as socket:
                for _ in range(3):
                    await socket.send(request)
                    replies.append(decode(await socket.recv(), max_bytes=2**20).message)

            assert replies[0] == replies[1] == replies[2]
            assert (await here.store.run(operations.stats())).leased == 2

    asyncio.run(story())


def test_a_grant_whose_broker_died_is_made_again_by_the_next(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as first, ring(redis_url, keys) as second:
            await begin(first.store, groups=4)
            request = encode(LeaseRequest(2, FIRST), run=RUN, incarnation="actor-1", seq=9)

            replies = []
            for here in (first, second):
                async with here.raw_actor() as socket:
                    await socket.send(request)
                    replies.append(decode(await socket.recv(), max_bytes=2**20).message)

            assert isinstance(replies[0], LeaseReply)
            assert len(replies[0].leases) == 2
            assert replies[0] == replies[1]
            assert (await first.store.run(operations.stats())).leased == 2

    asyncio.run(story())


def test_a_second_copy_of_an_answer_does_not_cost_its_leases(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()  # its HELLO was number 1
            request = LeaseRequest(2, FIRST)
            assert len((await actor.lease(request)).leases) == 2

            copy = encode(request, run=RUN, incarnation="actor-1", seq=2)
            await actor._connection.send(copy)
            await asyncio.sleep(0.5)

            assert (await here.store.run(operations.stats())).leased == 2

    asyncio.run(story())


@pytest.mark.slow
def test_leases_that_come_too_late_are_given_back(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=3.0) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            with pytest.raises(DeadlineError):
                await actor.lease(LeaseRequest(2, FIRST), deadline_s=0.3)

            await begin(here.store, groups=1)  # the parked request is granted now
            await asyncio.sleep(1.0)

            assert (await here.store.run(operations.stats())).leased == 0
            assert (await here.store.run(operations.stats())).ready == 2

    asyncio.run(story())


@pytest.mark.slow
def test_what_is_being_granted_while_an_actor_leaves_is_given_back_before_it_is_gone(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = AsyncStore.run

    async def slow(store: AsyncStore, operation: Operation[Any]) -> Any:
        done = await run(store, operation)
        if operation.name == "lease":
            await asyncio.sleep(0.5)  # granted, and the reply not yet on its way
        return done

    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=10.0) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            with pytest.raises(DeadlineError):
                await actor.lease(LeaseRequest(2, FIRST), deadline_s=1.0)
            await begin(here.store, groups=1)
            await until_stats(
                here, lambda stats: stats.leased > 0
            )  # the parked request comes to its turn

            await actor.bye()

            stats = await here.store.run(operations.stats())
            assert (stats.leased, stats.ready) == (0, 2)

    monkeypatch.setattr(AsyncStore, "run", slow)
    asyncio.run(asyncio.wait_for(story(), 30.0))


@pytest.mark.slow
def test_a_peer_that_does_not_read_costs_no_memory(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, max_completion_tokens=20_000) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            (lease, _) = (await actor.lease(LeaseRequest(2, FIRST))).leases
            chunk = encode_completion(completion(lease.fence, tokens=20_000))  # 180 kB
            beat = Beat(lease.task_id, lease.fence, 0, 20_000, chunk)
            assert (await actor.beat(BeatRequest((beat,), FIRST))).verdicts[0].length == 20_000
            await actor.release(ReleaseRequest(((lease.task_id, lease.fence),)))
            request = encode(LeaseRequest(1, FIRST), run=RUN, incarnation="slow", seq=10**6)
            before = resident_mib()

            async with here.raw_actor("slow") as socket:
                for _ in range(1200):  # 216 MB of replies, were they kept
                    await socket.send(request)
                await asyncio.sleep(2.5)

                assert resident_mib() - before < 80
                assert (await actor.beat(BeatRequest((), FIRST))).verdicts == ()
                await until_all_is_read(socket)

    asyncio.run(story())


async def until_all_is_read(socket: zmq.asyncio.Socket) -> None:
    """Read until the broker has answered what is said last.

    libzmq 4.3.5 aborts its process if a context ends soon after a peer left that was being held
    back (`!_io_error` in stream_engine_base.cpp).
    """
    last = encode(BeatRequest((), FIRST), run=RUN, incarnation="actor-1", seq=2 * 10**6)
    async with asyncio.timeout(60):
        while True:
            await socket.send(last)
            while await socket.poll(1000):
                if decode(await socket.recv(), max_bytes=2**20).seq == 2 * 10**6:
                    return


def test_replies_never_exceed_the_message_limit(redis_url: str, keys: Path) -> None:
    """Resumed episodes whose chunks do not fit into one reply are granted over several."""

    async def story() -> None:
        async with ring(redis_url, keys, max_completion_tokens=25_000) as here:
            await begin(here.store, groups=5)
            actor = await here.actor()
            leases = (await actor.lease(LeaseRequest(10, FIRST))).leases
            for lease in leases:
                chunk = encode_completion(completion(lease.fence, tokens=25_000))  # 225 kB
                beat = Beat(lease.task_id, lease.fence, 0, 25_000, chunk)
                await actor.beat(BeatRequest((beat,), FIRST))
            await actor.release(ReleaseRequest(tuple((e.task_id, e.fence) for e in leases)))

            resumed: list[int] = []
            while len(resumed) < 10:
                reply: LeaseReply = await actor.lease(LeaseRequest(10, FIRST), deadline_s=10)
                assert 0 < len(reply.leases) < 5
                assert np.all([lease.length == 25_000 for lease in reply.leases])
                resumed += [lease.task_id for lease in reply.leases]
            assert sorted(resumed) == list(range(10))

    asyncio.run(story())
