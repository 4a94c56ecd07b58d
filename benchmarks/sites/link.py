"""A far link between two networks of this machine: a delay, losses and a rate, packet by packet.

`python -m benchmarks.sites.link HUB SITE DEVICE` opens a device of this name in both networks (TUN,
Linux, root) and carries whole IP packets between them, so that TCP meets what it would meet on the
way to another continent. The kernel's own `netem` does the same where it is built in, which it is
not everywhere. stdin sets the link, one JSON object a line (`Limits`); its end ends the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from lab.faults.network import enter

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 65_536
BURST = 64
"""Packets read from one device before the other is looked at."""
QUEUE_S = 0.25
"""For which packets may wait before the link, as in a router; those beyond are lost."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of packets."""
    bytes_per_s: float | None = None
    """None = no limit."""


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, *, seed: int) -> None:
        self.source = source
        self._target = target
        self._random = random.Random(seed)
        self._on_way: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0
        """When the last packet so far will have left."""

    def take(self, limits: Limits) -> None:
        """Read what has arrived at the source."""
        for _ in range(BURST):
            try:
                packet = os.read(self.source, MAX_PACKET)
            except BlockingIOError:
                return
            now = time.monotonic()
            leaves = max(self._free_at, now)
            if limits.bytes_per_s is not None:
                if leaves - now > QUEUE_S:
                    continue
                leaves += len(packet) / limits.bytes_per_s
            self._free_at = leaves
            if self._random.random() >= limits.loss:
                self._on_way.append((leaves + limits.delay_s, packet))

    def deliver(self) -> float:
        """Write what is due; returns the seconds until the next is, at most a second."""
        now = time.monotonic()
        while self._on_way and self._on_way[0][0] <= now:
            packet = self._on_way.popleft()[1]
            with suppress(OSError):  # that end is not up yet
                os.write(self._target, packet)
        return min(1.0, self._on_way[0][0] - now) if self._on_way else 1.0


def main() -> None:
    """Carry packets until stdin ends."""
    hub, site, device = sys.argv[1:]
    ends = [_open(network, device) for network in (hub, site)]
    ways = [Direction(*ends, seed=1), Direction(*reversed(ends), seed=2)]
    print("open", flush=True)
    limits = Limits()
    while True:
        wait_s = min(way.deliver() for way in ways)
        readable, _, _ = select.select([*ends, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            limits = Limits(**json.loads(line))
        for way in ways:
            if way.source in readable:
                way.take(limits)


def _open(network: str, device: str) -> int:
    """Make a device in a network; returns its file."""
    enter(network)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH14x", device.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(end, TUNSETIFF, request)
    return end


if __name__ == "__main__":
    main()
