"""A partition as the kernel makes one: an actor in a network of its own, whose link goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from console.chaos.case import Case
from console.chaos.fault import Fault

HERE, THERE = "10.213.97.1", "10.213.97.2"  # a link between two ends of this machine, no more
SPACE, NEAR, FAR = "nyala-chaos", "nyala-near", "nyala-far"
TOOL_S = 10.0
SERVE_S = 90.0
OVERRIDES = (
    f"broker.endpoint=tcp://{HERE}:0",
    f"learner.publisher_endpoint=tcp://{HERE}:0",
    "learner.broadcast=false",  # gloo would listen on loopback, which the other network has not
)


@contextmanager
def two_networks(_folder: Path) -> Iterator[Mapping[str, str]]:
    """Make a second network with one link to this one."""
    _remove()
    try:
        _ip("netns", "add", SPACE)
        _ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", SPACE)
        _ip("address", "add", f"{HERE}/30", "dev", NEAR)
        _ip("link", "set", NEAR, "up")
        _ip("-n", SPACE, "address", "add", f"{THERE}/30", "dev", FAR)
        for name in ("lo", FAR):
            _ip("-n", SPACE, "link", "set", name, "up")
        yield {}
    finally:
        _remove()


def cut(case: Case) -> None:
    """Packets are lost for longer than leases last; then the actor is heard again, too late."""
    fleet = case.ring.fleet
    victim = fleet.add("console.refresh_s=0.5", prefix=("ip", "netns", "exec", SPACE))
    try:
        case.ring.until(fleet.all_serve, "the actor in the other network serves", SERVE_S)
        case.settle()
        case.choose([victim])
        case.follow([victim])
        case.inject(lambda: _ip("-n", SPACE, "link", "set", FAR, "down"))
        case.until(lambda: not case.trail.open_ids, "another actor goes on with its work")
        case.lift(lambda: _ip("-n", SPACE, "link", "set", FAR, "up"))
        case.pause(2.0)  # what it still holds is refused
        case.recover()
    finally:
        fleet.remove(victim)


def _obstacle() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "it needs root and the `ip` command, to make a network"
    probe = subprocess.run(
        ("unshare", "--net", "true"), check=False, capture_output=True, timeout=TOOL_S
    )
    return None if probe.returncode == 0 else "this kernel allows no network namespaces here"


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, timeout=TOOL_S)


def _remove() -> None:
    for words in (("link", "delete", NEAR), ("netns", "delete", SPACE)):
        subprocess.run(("ip", *words), check=False, timeout=TOOL_S, capture_output=True)


FAULTS = (
    Fault(
        "net-partition",
        "network partition (namespace) for longer than leases last",
        cut,
        _obstacle,
        two_networks,
        OVERRIDES,
    ),
)
