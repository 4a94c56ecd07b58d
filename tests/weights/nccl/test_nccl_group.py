"""Groups over NCCL, with a fake group in its place: deadlines and aborts of our side."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from actors.engine.weights.group import ReceivingGroup
from broker.protocol.weight_messages import Epoch
from buffer.record.episode import PolicyVersion
from learner.weights.group import GroupPlan, SendingGroup, listen
from tests.weights.support.fake_nccl import FakeNccl, fake_nccl

JOIN_S, SHORT_JOIN_S = 10.0, 1.0
BYTES = os.urandom(100_003)
BUCKET = 20_000


@pytest.fixture(autouse=True)
def members() -> Iterator[list[FakeNccl]]:
    with fake_nccl() as made:
        yield made


def mapped(contents: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(contents))
    memory[:] = contents
    return memory


def plan(size: int, backend: str = "nccl", *, join_s: float = JOIN_S) -> GroupPlan:
    return GroupPlan(backend, "127.0.0.1", size, join_s)


def epoch(port: int, size: int) -> Epoch:
    return Epoch(
        number=1,
        version=PolicyVersion(1, 1),
        fresh=True,
        backend="nccl",
        host="127.0.0.1",
        port=port,
        rank=1,
        size=size,
        bucket_bytes=BUCKET,
        join_s=JOIN_S,
        send_s=5.0,
    )


def receive(port: int, memory: mmap.mmap) -> threading.Thread:
    def run() -> None:
        group = ReceivingGroup(epoch(port, 2))
        for _ in group.receive(memory, bucket_bytes=BUCKET, send_s=5.0):
            pass
        group.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_version_arrives_and_both_ends_abort_their_communicator(members: list[FakeNccl]) -> None:
    listener = listen("127.0.0.1")
    arrived = mapped(bytes(len(BYTES)))
    receiver = receive(listener.getsockname()[1], arrived)
    group = SendingGroup(plan(2), listener)

    group.send(mapped(BYTES), bucket_bytes=BUCKET, send_s=5.0)
    receiver.join(10.0)
    group.close()

    assert arrived[:] == BYTES
    assert [member.is_aborted for member in members] == [True, True]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"  # a time-out ends no process


@pytest.mark.slow
def test_a_member_that_never_comes_costs_the_time_to_join_and_no_more(
    members: list[FakeNccl],
) -> None:
    listener = listen("127.0.0.1")
    group = SendingGroup(plan(2, join_s=SHORT_JOIN_S), listener)
    began = time.monotonic()

    with pytest.raises(RuntimeError):
        group.send(mapped(BYTES), bucket_bytes=BUCKET, send_s=60.0)
    group.close()

    assert time.monotonic() - began < 10.0
    assert [member.is_aborted for member in members] == [True]


def test_a_member_that_dies_on_the_way_costs_the_deadline_at_most() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    has_begun = threading.Event()

    def die() -> None:
        group = ReceivingGroup(epoch(port, 2))
        next(iter(group.receive(mapped(bytes(len(BYTES))), bucket_bytes=BUCKET, send_s=5.0)))
        has_begun.set()
        group.close()

    dying = threading.Thread(target=die)
    dying.start()
    group = SendingGroup(plan(2), listener)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        group.send(mapped(bytes(40 * 2**20)), bucket_bytes=BUCKET, send_s=20.0)
    group.close()
    dying.join(10.0)

    assert has_begun.is_set()
    assert time.monotonic() - began < 15.0


def test_the_store_of_a_group_takes_the_first_free_port_of_the_range() -> None:
    first, last = free_ports()
    with listen("127.0.0.1", (first, last)) as one, listen("127.0.0.1", (first, last)) as two:
        assert [s.getsockname()[1] for s in (one, two)] == [first, last]
        with pytest.raises(OSError, match=f"must have a free port, got {first} to {last}, all in"):
            listen("127.0.0.1", (first, last))


def test_an_address_of_another_machine_is_no_matter_of_ports() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen("192.0.2.1", free_ports())


def free_ports() -> tuple[int, int]:
    """Two ports beside each other that nobody listens on."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port, port + 1
            except OSError:
                continue
