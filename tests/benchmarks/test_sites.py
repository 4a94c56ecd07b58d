"""The arithmetic of `python -m benchmarks.sites`, and its link."""

import os
import socket

import pytest

from benchmarks.sites.__main__ import figures, ratios
from benchmarks.sites.link import QUEUE_S, Direction, Limits
from benchmarks.sites.ring import Window


def test_every_ratio_is_better_when_larger():
    arms = {
        "sites": {"uplink_bytes_per_batch": 100, "tokens_per_s": 95.0},
        "full": {"uplink_bytes_per_batch": 8000, "tokens_per_s": 20.0},
        "no_link": {"uplink_bytes_per_batch": 100, "tokens_per_s": 100.0},
    }

    assert ratios(arms) == {
        "site_bytes_fewer": 80.0,
        "site_over_full_tokens_per_s": 4.75,
        "site_over_no_link_tokens_per_s": 0.95,
    }


def test_an_arm_counts_all_its_windows_by_their_length():
    windows = [Window(2, 4.0, 400, 10, 1.0), Window(2, 12.0, 400, 30, 3.0)]

    assert figures(windows) == {
        "batches": 4,
        "step_s": 4.0,
        "tokens_per_s": 50.0,
        "tokens_per_s_by_window": [100.0, 33.3],
        "uplink_bytes_per_batch": 10,
        "learner_waited": 0.25,
    }


class Way:
    """A direction between two sockets that keep packets apart, and its clock."""

    def __init__(self, monkeypatch, *, seed: int = 1) -> None:
        self.now = 100.0
        monkeypatch.setattr("benchmarks.sites.link.time.monotonic", lambda: self.now)
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        for pair in self._pairs:
            for end in pair:
                end.setblocking(False)
        (self.sender, source), (target, self._receiver) = self._pairs
        self.direction = Direction(source.fileno(), target.fileno(), seed=seed)

    def arrived(self) -> list[bytes]:
        self.direction.deliver()
        found = []
        while True:
            try:
                found.append(os.read(self._receiver.fileno(), 1000))
            except BlockingIOError:
                return found

    def close(self) -> None:
        for pair in self._pairs:
            for end in pair:
                end.close()


@pytest.fixture
def way(monkeypatch):
    made = Way(monkeypatch)
    yield made
    made.close()


def test_a_packet_arrives_after_the_delay_and_those_before_it(way):
    limits = Limits(delay_s=0.5, bytes_per_s=100.0)
    for text in (b"a" * 10, b"b" * 10):
        way.sender.send(text)
    way.direction.take(limits)

    assert way.arrived() == []
    way.now += 0.61  # ten bytes take 0.1 s
    assert way.arrived() == [b"a" * 10]
    way.now += 0.1
    assert way.arrived() == [b"b" * 10]


def test_what_finds_the_queue_full_is_lost(way):
    for _ in range(6):
        way.sender.send(b"x" * 10)

    way.direction.take(Limits(bytes_per_s=100.0))

    way.now += 10.0
    waits = int(QUEUE_S / 0.1) + 1  # those that a packet may find before it
    assert len(way.arrived()) == waits


def test_so_many_packets_are_lost(way):
    for _ in range(100):
        for _ in range(20):
            way.sender.send(b"x")
            way.direction.take(Limits(loss=0.1))

    assert 1700 < len(way.direction._on_way) < 1900
