"""Faults of the network between one actor and the broker, made by a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from console.chaos.actor_fleet import Actor
from console.chaos.fault import Fault
from console.chaos.fault_case import FaultCase

from .proxy import Proxy

DELAY_S = 0.2
DELAYED_S = 5.0
SLOW_CLOSE_S = 5.0
SERVE_S = 240.0


@contextmanager
def _behind_a_proxy(case: FaultCase) -> Iterator[tuple[Actor, Proxy]]:
    """Add an actor that reaches the broker through a proxy, and choose it as the victim."""
    run = case.run
    parts = urlsplit(run.settings.broker.endpoint)
    assert parts.hostname is not None and parts.port is not None
    with Proxy(parts.hostname, parts.port) as proxy:
        actor = run.fleet.add(f"broker.endpoint=tcp://127.0.0.1:{proxy.port}")
        try:
            run.until(run.fleet.all_serve, "the actor behind the proxy serves", SERVE_S)
            case.settle()
            case.choose([actor])
            case.follow([actor])
            yield actor, proxy
        finally:
            run.fleet.remove(actor)


def delay(case: FaultCase) -> None:
    """Every message takes longer by far than usual; leases are kept."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(lambda: proxy.delay(DELAY_S))
        case.pause(DELAYED_S)
        case.lift(proxy.flow)
        case.recover()


def block(case: FaultCase) -> None:
    """No packet passes for longer than leases last; then the actor is back, too late."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(proxy.block)
        case.until(lambda: not case.trace.open_ids, "another actor goes on with its work")
        case.lift(proxy.flow)
        case.pause(1.0)  # what it still holds is refused
        case.recover()


def reset(case: FaultCase) -> None:
    """The connection breaks; the actor connects again and resends."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(proxy.reset)
        case.recover()


def close_slowly(case: FaultCase) -> None:
    """The actor sees an end that the broker sees seconds later: two connections of one actor."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(lambda: proxy.close_slowly(SLOW_CLOSE_S))
        case.recover()


def half_open(case: FaultCase) -> None:
    """The connection leads nowhere and no end is closed; only missing heartbeats reveal it."""
    with _behind_a_proxy(case) as (_, proxy):
        case.inject(proxy.half_open)
        case.recover()


FAULTS = (
    Fault("net-delay", f"network {DELAY_S:g} s slower for {DELAYED_S:g} s", delay),
    Fault("net-block", "network drops everything for longer than leases last", block),
    Fault("net-reset", "connection reset", reset),
    Fault(
        "net-slow-close", f"connection closed on one side {SLOW_CLOSE_S:g} s earlier", close_slowly
    ),
    Fault("net-half-open", "connection open on one side only", half_open),
)
