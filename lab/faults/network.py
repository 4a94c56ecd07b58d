"""Faults of the network between one actor and the broker, made by a proxy or a second network.

Benchmarks put processes into a `SecondNetwork` too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from lab.actor_fleet import Actor
from lab.fault_case import Fault, FaultCase

from .proxy import Proxy

# --------------------------------------------------------------------------------------------------
# A second network on this machine, with one link to the first: real partitions and slow links.
#
# Made by the kernel, out of a namespace and a pair of virtual cards. Needs root and the `ip`
# command, for a limit `tc` too; touches no other network.

TOOL_S = 10.0
NUMBERS = 2**14
FIRST_OF_PROCESS = 16  # lower numbers are chosen explicitly
CLONE_NEWNET = 0x40000000
BURST, QUEUE = "2mb", "50ms"
"""Bytes that a limited card may send at once, and the longest wait of a packet."""


class SecondNetwork:
    """A second network with the addresses `here` and `there` at the two ends of its link.

    A `with` statement makes it and removes it. `name` is that of the network that `there` is in.

    Args:
        number: Number of the network on this machine; leftovers of this number are removed. None =
            a number of this process.
    """

    def __init__(self, number: int | None = None) -> None:
        if number is None:
            number = FIRST_OF_PROCESS + os.getpid() % (NUMBERS - FIRST_OF_PROCESS)
        subnet = f"10.{64 + number // 256}.{number % 256}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"
        self.name = f"nyala-{number}"
        self.near, self.far = f"ny-near-{number}", f"ny-far-{number}"

    def cut(self) -> None:
        """Lose every packet silently."""
        self._there("link", "set", self.far, "down")

    def heal(self) -> None:
        """Let packets pass again."""
        self._there("link", "set", self.far, "up")

    def limit(self, bits_per_s: int) -> None:
        """Send no faster than this from here to there."""
        limit = ("rate", f"{bits_per_s}bit", "burst", BURST, "latency", QUEUE)
        _run("tc", "qdisc", "replace", "dev", self.near, "root", "tbf", *limit)

    def __enter__(self) -> Self:
        self._remove()
        try:
            _run("ip", "netns", "add", self.name)
            peer = ("peer", "name", self.far, "netns", self.name)
            _run("ip", "link", "add", self.near, "type", "veth", *peer)
            _run("ip", "address", "add", f"{self.here}/30", "dev", self.near)
            _run("ip", "link", "set", self.near, "up")
            self._there("address", "add", f"{self.there}/30", "dev", self.far)
            for card in ("lo", self.far):
                self._there("link", "set", card, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _there(self, *words: str) -> None:
        _run("ip", "-n", self.name, *words)

    def _remove(self) -> None:
        for words in (("link", "delete", self.near), ("netns", "delete", self.name)):
            subprocess.run(("ip", *words), check=False, timeout=TOOL_S, capture_output=True)


def obstacle(*, limits: bool = False) -> str | None:
    """Return why this machine can have no second network, or no limited one; else None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "it needs root and the `ip` command, to make a network"
    if limits and shutil.which("tc") is None:
        return "it needs the `tc` command, to limit what a card sends"
    probe = subprocess.run(
        ("unshare", "--net", "true"), check=False, capture_output=True, timeout=TOOL_S
    )
    return None if probe.returncode == 0 else "this kernel allows no network namespaces here"


def enter(name: str) -> None:
    """Move this thread and its children into a network (`os.setns` needs Python 3.12).

    Raises:
        OSError: There is no such network, or this user may not enter it.
    """
    with Path(f"/run/netns/{name}").open() as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network {name} cannot be entered")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=TOOL_S)


# --------------------------------------------------------------------------------------------------
# Faults of the network between one actor and the broker, made by a proxy.

DELAY_S = 0.2
DELAYED_S = 5.0
SLOW_CLOSE_S = 5.0
PROXY_SERVE_S = 240.0


@contextmanager
def _behind_a_proxy(case: FaultCase) -> Iterator[tuple[Actor, Proxy]]:
    """Add an actor that reaches the broker through a proxy, and choose it as the victim."""
    run = case.run
    parts = urlsplit(run.settings.broker.endpoint)
    assert parts.hostname is not None and parts.port is not None
    with Proxy(parts.hostname, parts.port) as proxy:
        actor = run.fleet.add(f"broker.endpoint=tcp://127.0.0.1:{proxy.port}")
        try:
            run.until(run.fleet.all_serve, "a lease of the actor behind the proxy", PROXY_SERVE_S)
            case.settle()
            case.choose([actor])
            case.follow([actor])
            yield actor, proxy
        finally:
            run.fleet.remove(actor)


def delay(case: FaultCase) -> None:
    """Delay every message by far; leases are kept."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(lambda: proxy.delay(DELAY_S))
        case.pause(DELAYED_S)
        case.lift(proxy.flow)
        case.recover()


def block(case: FaultCase) -> None:
    """Pass no packet for longer than leases last; then the actor comes back too late."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(proxy.block)
        case.until(lambda: not case.trace.open_ids, "another actor for its work")
        case.lift(proxy.flow)
        case.pause(1.0)  # its old leases are refused
        case.recover()


def reset(case: FaultCase) -> None:
    """Break the connection; the actor connects again and resends."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(proxy.reset)
        case.recover()


def close_slowly(case: FaultCase) -> None:
    """Close the actor's side seconds before the broker's: one actor has two connections."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(lambda: proxy.close_slowly(SLOW_CLOSE_S))
        case.recover()


def half_open(case: FaultCase) -> None:
    """Cut the connection without closing the actor's end; only missing heartbeats reveal it."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(proxy.half_open)
        case.recover()


# --------------------------------------------------------------------------------------------------
# A network partition made by the kernel: an actor in its own namespace, whose link goes down.

NETWORK = SecondNetwork(0)
PARTITION_SERVE_S = 90.0
OVERRIDES = (
    f"broker.endpoint=tcp://{NETWORK.here}:0",
    f"learner.publisher_endpoint=tcp://{NETWORK.here}:0",
    "learner.broadcast=false",  # gloo would listen on loopback, which the other network has not
)


@contextmanager
def two_networks(_folder: Path) -> Iterator[Mapping[str, str]]:
    """Make a second network with one link to this one."""
    with NETWORK:
        yield {}


def cut(case: FaultCase) -> None:
    """Lose packets for longer than leases last; then the actor comes back too late."""
    fleet = case.run.fleet
    victim = fleet.add("console.refresh_s=0.5", prefix=("ip", "netns", "exec", NETWORK.name))
    try:
        case.run.until(
            fleet.all_serve, "a lease of the actor in the other network", PARTITION_SERVE_S
        )
        case.settle()
        case.choose([victim])
        case.follow([victim])
        case.inject(NETWORK.cut)
        case.until(lambda: not case.trace.open_ids, "another actor for its work")
        case.lift(NETWORK.heal)
        case.pause(2.0)  # its old leases are refused
        case.recover()
    finally:
        fleet.remove(victim)


FAULTS = (
    Fault("net-delay", f"network {DELAY_S:g} s slower for {DELAYED_S:g} s", delay),
    Fault("net-block", "network drops everything for longer than leases last", block),
    Fault("net-reset", "connection reset", reset),
    Fault(
        "net-slow-close", f"connection closed on one side {SLOW_CLOSE_S:g} s earlier", close_slowly
    ),
    Fault("net-half-open", "connection open on one side only", half_open),
    Fault(
        "net-partition",
        "network partition (namespace) for longer than leases last",
        cut,
        obstacle,
        two_networks,
        OVERRIDES,
    ),
)
