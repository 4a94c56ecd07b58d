"""A network partition made by the kernel: an actor in its own namespace, whose link goes down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from console.chaos.fault import Fault
from console.chaos.fault_case import FaultCase

from .network_namespace import SecondNetwork, obstacle

NETWORK = SecondNetwork(0)
SERVE_S = 90.0
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
    """Packets are lost for longer than leases last; then the actor is back, too late."""
    fleet = case.run.fleet
    victim = fleet.add("console.refresh_s=0.5", prefix=("ip", "netns", "exec", NETWORK.name))
    try:
        case.run.until(fleet.all_serve, "the actor in the other network serves", SERVE_S)
        case.settle()
        case.choose([victim])
        case.follow([victim])
        case.inject(NETWORK.cut)
        case.until(lambda: not case.trace.open_ids, "another actor goes on with its work")
        case.lift(NETWORK.heal)
        case.pause(2.0)  # what it still holds is refused
        case.recover()
    finally:
        fleet.remove(victim)


FAULTS = (
    Fault(
        "net-partition",
        "network partition (namespace) for longer than leases last",
        cut,
        obstacle,
        two_networks,
        OVERRIDES,
    ),
)
