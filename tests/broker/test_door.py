"""Authentication of peers, and requests that an authenticated peer cannot abuse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    FailRequest,
    Failure,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    Submission,
    SubmitRequest,
)
from broker.server.server import Broker
from broker.transport.keys import KeyPair, load_pair, load_public, make_client, make_keys
from broker.transport.sockets import bind_router, bound_endpoint, connect_dealer
from broker.transport.zap import DOMAIN, ZAP_ENDPOINT, ZapAuthenticator
from buffer import operations
from buffer.store import AsyncStore
from configs.errors import DeadlineError, RefusedError, SettingsError
from configs.weight_path import is_loopback
from tests.broker.support.records import record_of, submission
from tests.broker.support.ring import (
    FIRST,
    RUN,
    Ring,
    begin,
    fingerprint,
    hello,
    pair_of,
    ring,
    settings_with,
    until_refused,
)


def stranger() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public, secret)


async def refusal(socket: zmq.asyncio.Socket) -> Refusal:
    frame = await asyncio.wait_for(socket.recv(), 5)
    message = decode(frame, max_bytes=2**20).message
    assert isinstance(message, Refusal)
    return message


def test_an_unknown_key_is_refused_and_changes_nothing(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            before = fingerprint(redis_url)
            intruder = here.client("intruder", keys=stranger())

            with pytest.raises(RefusedError, match=r"refused this key.*allowed/"):
                await intruder.hello(hello("intruder"), deadline_s=10)
            assert fingerprint(redis_url) == before

    asyncio.run(story())


def test_a_wrong_server_key_ends_at_the_deadline_with_the_likely_causes(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            lost = here.client("lost", server_key=stranger().public)

            with pytest.raises(DeadlineError, match=r"broker\.pub is its key"):
                await lost.hello(hello("lost"), deadline_s=1.0)

    asyncio.run(story())


@pytest.mark.slow
def test_a_peer_without_curve_is_not_heard(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            context = zmq.asyncio.Context()
            plain = context.socket(zmq.DEALER)
            plain.connect(here.endpoint)
            await plain.send(encode(hello("plain"), run=RUN, incarnation="plain", seq=1))

            assert not await plain.poll(2500)
            context.destroy(linger=0)
            assert await here.store.run(operations.actors()) == []

    asyncio.run(story())


def test_a_request_that_cannot_be_judged_is_refused_and_the_door_goes_on(keys: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    actor = z85.decode(pair_of(keys, "actor").public)
    peer = [DOMAIN, b"127.0.0.1", b"", b"CURVE", actor]
    with ZapAuthenticator(context, keys):
        asking = context.socket(zmq.REQ)
        asking.rcvtimeo, asking.linger = 3000, 0
        asking.connect(ZAP_ENDPOINT)

        statuses = []
        for request in ([b"1.0", b"7", DOMAIN], [b"1.0", b"8", *peer]):
            asking.send_multipart(request)
            reply = asking.recv_multipart()
            assert reply[:2] == request[:2]
            statuses.append(reply[2])
        asking.close()

    assert statuses == [b"500", b"200"]
    context.destroy(linger=0)


def test_a_broker_whose_authenticator_died_ends_with_its_error(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: ZapAuthenticator, _request: list[bytes]) -> list[bytes]:
        raise RuntimeError("the authenticator is broken")

    async def story() -> None:
        store, listening = AsyncStore(redis_url, RUN), asyncio.Event()
        broker = Broker(settings_with(), store, keys=keys)
        serving = asyncio.create_task(
            broker.serve(asyncio.Event(), on_ready=lambda _endpoint: listening.set())
        )
        await asyncio.wait_for(listening.wait(), 5)
        here = Ring(store, broker._endpoint, keys)
        newcomer = asyncio.create_task(here.client().hello(hello("actor-1"), deadline_s=30))

        with pytest.raises(RuntimeError, match="the authenticator is broken"):
            await asyncio.wait_for(serving, 5)

        newcomer.cancel()
        await asyncio.gather(newcomer, return_exceptions=True)
        await here.close()

    monkeypatch.setattr(ZapAuthenticator, "_safe_answer", broken)
    asyncio.run(story())


def test_without_a_door_nobody_gets_in(keys: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = bind_router(
        context, "tcp://127.0.0.1:0", keys=load_pair(keys, "broker"), max_message_bytes=4096
    )
    dealer = connect_dealer(
        context,
        bound_endpoint(router),
        keys=pair_of(keys, "actor"),
        server_key=load_public(keys, "broker"),
        max_message_bytes=4096,
    )
    assert not dealer.poll(500, zmq.POLLOUT)
    with pytest.raises(zmq.Again):
        dealer.send(b"hi", zmq.NOBLOCK)
    assert not router.poll(100)
    context.destroy(linger=0)


@pytest.mark.slow
def test_a_key_that_is_added_gets_in_and_one_that_is_removed_is_not_heard(
    redis_url: str, tmp_path: Path
) -> None:
    async def story() -> None:
        folder = make_keys(tmp_path / "keys")
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            make_client(folder, "spot-7")
            late = here.client("actor-7", keys=load_pair(folder, "spot-7"))
            await late.hello(hello("actor-7"), deadline_s=5)

            (folder / "allowed" / "actor" / "spot-7.pub").unlink()
            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await until_refused(late)

    asyncio.run(story())


def test_another_key_cannot_speak_for_an_incarnation(redis_url: str, tmp_path: Path) -> None:
    async def story() -> None:
        folder = make_keys(tmp_path / "keys")
        make_client(folder, "other")
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            actor = await here.actor("actor-1")
            async with here.raw_socket(keys=load_pair(folder, "other")) as thief:
                message = LeaseRequest(1, FIRST)
                await thief.send(encode(message, run=RUN, incarnation="actor-1", seq=2**63 - 1))
                answer = decode(await asyncio.wait_for(thief.recv(), 5), max_bytes=2**20).message

            assert isinstance(answer, Refusal)
            assert answer.code == "hello"
            assert (await actor.lease(LeaseRequest(1, FIRST))).status == "OK"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([b"\xc1 garbage"], "MessagePack data is malformed"),
        (
            [encode(Bye(), run=RUN, incarnation="a", seq=3).replace(b"\xa3bye", b"\xa3die")],
            "Invalid value 'die'",
        ),
        ([msgpack.packb({"v": 1, "run": RUN, "inc": "a", "seq": 3, "op": "bye"})], "wire version"),
        ([encode(Refusal("x", "y"), run=RUN, incarnation="actor-1", seq=1)], "request to the"),
        ([encode(Bye(), run="other", incarnation="actor-1", seq=1)], "run must be 'test'"),
        ([encode(LeaseRequest(1, FIRST), run=RUN, incarnation="new", seq=1)], "say HELLO first"),
        ([encode(hello("b"), run=RUN, incarnation="a", seq=1)], "incarnation must be 'a'"),
    ],
)
def test_a_bad_message_is_refused_by_name(
    redis_url: str, keys: Path, frames: list[bytes], complaint: str
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            await here.actor("actor-1")
            before = fingerprint(redis_url)
            async with here.raw_socket() as socket:
                await socket.send_multipart(frames)
                assert complaint in (await refusal(socket)).text
            assert fingerprint(redis_url) == before

    asyncio.run(story())


def test_extra_frames_and_oversized_ones_do_not_hurt_others(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor("actor-1")
            async with here.raw_socket() as socket:
                await socket.send_multipart([b"x"] * 50)
                await socket.send(bytes(100 * 2**20))
                await asyncio.sleep(0.5)
            assert len((await actor.lease(LeaseRequest(2, FIRST))).leases) == 2

    asyncio.run(story())


def test_what_is_out_of_range_is_refused_and_changes_nothing(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            lease, _ = (await actor.lease(LeaseRequest(2, FIRST))).leases
            before = fingerprint(redis_url)
            task, fence = lease.task_id, lease.fence
            other = record_of(lease, task_id=task + 1)
            cut = record_of(lease)[:-1]

            for call, request, complaint in [
                (actor.lease, LeaseRequest(65, FIRST), "n must be between 1 and 64, got 65"),
                (actor.lease, LeaseRequest(0, FIRST), "n must be between"),
                (actor.submit, submission(lease, other), f"must be of task {task}, got task"),
                (actor.submit, submission(lease, cut), "complete msgpack"),
                (
                    actor.submit,
                    SubmitRequest((Submission(-1, 1, b""),)),
                    r">= 0 - at `\$.message.submis",
                ),
                (actor.beat, beat(task, fence, chunk=b"\xff"), "must be a map"),
                (actor.beat, beat(task, 2**60), r"<= 9007199254740991 - at `\$.message.beats"),
                (
                    actor.beat,
                    BeatRequest((Beat(task, fence),) * 5000, FIRST),
                    r"length <= 4096 - at `\$.message.beats",
                ),
                (actor.release, ReleaseRequest(((2**60, 1),)), r"<= 9007199254740991"),
                (
                    actor.fail,
                    FailRequest((Failure(task, fence, "odd", ""),)),  # type: ignore[arg-type]
                    "Invalid enum value 'odd'",
                ),
                (
                    actor.fail,
                    FailRequest((Failure(task, fence, "data", "x" * 9999),)),
                    "length <= 2000",
                ),
            ]:
                with pytest.raises(RefusedError, match=complaint):
                    await call(request)  # type: ignore[operator]
            assert fingerprint(redis_url) == before

    asyncio.run(story())


def beat(task: int, fence: int, *, chunk: bytes = b"", num_tokens: int = 0) -> BeatRequest:
    return BeatRequest((Beat(task, fence, 0, num_tokens, chunk),), FIRST)


def test_an_actor_of_other_settings_is_refused_by_the_key_that_differs(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, max_actors=1) as here:
            await begin(here.store, groups=1)
            client = here.client("actor-1")
            with pytest.raises(RefusedError, match=r"reward must be the run's, r1, got r2"):
                await client.hello(hello("actor-1", reward="r2"))
            await client.hello(hello("actor-1"))
            with pytest.raises(RefusedError, match=r"at most broker.max_actors = 1"):
                await here.client("actor-2").hello(hello("actor-2"))

    asyncio.run(story())


def test_an_address_in_use_is_refused_with_a_next_step(keys: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ZapAuthenticator(context, keys):
        pair = load_pair(keys, "broker")
        first = bind_router(context, "tcp://127.0.0.1:0", keys=pair, max_message_bytes=4096)
        with pytest.raises(SettingsError, match="in use; give an address of this machine"):
            bind_router(context, bound_endpoint(first), keys=pair, max_message_bytes=4096)
        first.close()
    context.term()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False),
    ],
)
def test_loopback_is_recognised(endpoint: str, expected: bool) -> None:
    assert is_loopback(endpoint) is expected
