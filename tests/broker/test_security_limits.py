"""Hostile peers with a valid key: they take neither the broker's memory nor other actors' time."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from broker.protocol.codec import encode
from broker.protocol.messages import Beat, BeatRequest, LeaseRequest, ReleaseRequest
from broker.server.flow_control import SMALL_BYTES, WINDOW_S, ReplyLimiter
from broker.transport.keys import load_public
from broker.transport.sockets import connect_dealer
from buffer.record.codec import encode_completion
from buffer.store import AsyncStore
from configs.loader import save
from configs.settings import Settings
from tests.broker.support.broker_process import process
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.records import completion
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, pair_of

pytestmark = pytest.mark.slow

LARGE = 900_000  # bytes of a message, near the limit of 1 MiB
SMALL = 2_000


@pytest.fixture
def narrow(run_settings: Settings) -> Settings:
    """A run whose actors may have 4 MiB each at the broker."""
    changes = {"max_inflight_mb_per_actor": 4}
    settings = run_settings.model_copy(
        update={
            "broker": run_settings.broker.model_copy(update=changes),
            "buffer": run_settings.buffer.model_copy(update={"max_episode_bytes": 2**19}),
            "run": run_settings.run.model_copy(update={"max_completion_tokens": 28_000}),
        }
    )
    save(settings, settings.run.folder / "config.yaml")
    return settings


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def beat_of(size: int) -> bytes:
    """Encode a heartbeat with a chunk of so many bytes, from an actor that nobody knows."""
    beat = Beat(0, 1, 0, 1, bytes(size))
    return encode(BeatRequest((beat,), FIRST), run=RUN, incarnation="x", seq=1)


@contextmanager
def hostile(
    settings: Settings, work: Callable[[zmq.Socket[bytes]], None], *, first: bytes | None = None
) -> Iterator[None]:
    """A peer that does its work over and over in a thread, reads nothing, and keeps connected."""
    folder, ended = settings.run.folder / "keys", threading.Event()

    def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = connect_dealer(
            context,
            settings.broker.endpoint,
            keys=pair_of(folder, "x"),
            server_key=load_public(folder, "broker"),
            max_message_bytes=2**20,
            receive_hwm=1,
        )
        if first is not None and socket.poll(5000, zmq.POLLOUT):
            socket.send(first)
        while not ended.is_set():
            try:
                work(socket)
            except zmq.Again:
                time.sleep(0.001)
        context.destroy(linger=0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def latencies(settings: Settings, redis_url: str, seconds: float) -> list[float]:
    """How long an honest actor waits for the answers to its heartbeats."""
    here = Ring(AsyncStore(redis_url, RUN), settings.broker.endpoint, settings.run.folder / "keys")
    actor = await here.actor("honest")
    waits: list[float] = []
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        began = time.monotonic()
        await actor.beat(BeatRequest((), FIRST), deadline_s=10)
        waits.append(time.monotonic() - began)
        await asyncio.sleep(0.02)
    await here.close()
    return waits


@pytest.mark.parametrize(
    ("message", "most_mib"),
    [
        # Its share is 4 MiB, and ZeroMQ holds some more: 4 to 10 were seen. Kept, they are 300.
        (beat_of(LARGE), 24),
        # 0.7 was seen at most; a broker that kept each message grew by 25 a second.
        (beat_of(SMALL), 8),
        (b"\xdd\xff\xff\xff\xff" * 1000, 8),
    ],
    ids=["large", "small", "malformed"],
)
def test_a_flood_costs_no_memory_and_an_honest_actor_little_time(
    redis_url: str, narrow: Settings, message: bytes, most_mib: float
) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=1)
        await store.close()
        with process(narrow, redis_url) as broker:
            await latencies(narrow, redis_url, 0.5)
            before = resident_mib(broker.pid)
            with hostile(narrow, lambda socket: socket.send(message, zmq.NOBLOCK)):
                waits = await latencies(narrow, redis_url, 2.0)
                growth = resident_mib(broker.pid) - before
            assert broker.poll() is None

        assert growth < most_mib
        assert statistics.median(waits) < 1.0
        assert max(waits) < 5.0

    asyncio.run(story())


def test_a_peer_that_never_reads_is_sent_only_its_share(redis_url: str, narrow: Settings) -> None:
    """A grant of half a MiB, asked for again and again: ZeroMQ's queue would take 64 of them."""

    async def grant() -> bytes:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=1)
        here = Ring(store, narrow.broker.endpoint, narrow.run.folder / "keys")
        actor = await here.actor("x")
        leases = (await actor.lease(LeaseRequest(2, FIRST))).leases
        for lease in leases:
            chunk = encode_completion(completion(lease.fence, tokens=28_000))  # 252 kB
            beat = Beat(lease.task_id, lease.fence, 0, 28_000, chunk)
            await actor.beat(BeatRequest((beat,), FIRST))
        await actor.release(ReleaseRequest(tuple((e.task_id, e.fence) for e in leases)))
        await here.close()
        return encode(LeaseRequest(2, FIRST), run=RUN, incarnation="x", seq=10**6)

    async def story() -> None:
        with process(narrow, redis_url) as broker:
            request = await grant()
            before = resident_mib(broker.pid)
            again = encode(hello("x"), run=RUN, incarnation="x", seq=1)
            with hostile(narrow, lambda s: s.send(request, zmq.NOBLOCK), first=again):
                waits = await latencies(narrow, redis_url, 2.0)
                growth = resident_mib(broker.pid) - before
            assert broker.poll() is None

        assert growth < 10  # its share is 4 MiB
        assert statistics.median(waits) < 1.0

    asyncio.run(story())


def test_a_peer_is_sent_its_share_in_each_window_and_small_replies_always() -> None:
    clock = FakeClock()
    limiter = ReplyLimiter(max_peer_bytes=100_000, clock=clock)

    assert limiter.allows(b"a", "x", 500_000)  # one reply of any size, or it could never be sent
    assert not limiter.allows(b"a", "x", SMALL_BYTES + 1)
    assert limiter.allows(b"a", "x", SMALL_BYTES)
    assert limiter.allows(b"b", "x", 60_000)
    assert not limiter.allows(b"b", "x", 60_000)
    clock.now += WINDOW_S
    assert limiter.allows(b"a", "x", 60_000)
    assert limiter.allows(b"b", "x", 60_000)


def test_keys_of_one_holder_are_sent_what_eight_of_them_may_be_sent() -> None:
    limiter = ReplyLimiter(max_peer_bytes=100_000, clock=FakeClock())

    assert sum(limiter.allows(b"%d" % n, "x", 50_000) for n in range(100)) == 16
    assert limiter.allows(b"other", "y", 50_000)
