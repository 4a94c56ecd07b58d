"""Brokers serve as long as their figures change, whatever their clocks say."""

from __future__ import annotations

from buffer.live_brokers import FORGOTTEN_S, STOPPED, LiveBrokers
from tests.broker.support.fake_clock import FakeClock


def test_a_broker_serves_while_its_figures_change() -> None:
    clock = FakeClock()
    live = LiveBrokers(at_most=9, clock=clock)
    assert live.observe({"a": {"at": 5.0}, "b": {"at": 9e9}}) == ("a", "b")

    clock.now += FORGOTTEN_S
    assert live.observe({"a": {"at": 4.0}, "b": {"at": 9e9}}) == ("a", "b")  # a's clock went back
    clock.now += 1.0

    assert live.observe({"a": {"at": 4.0}, "b": {"at": 9e9}}) == ("a",)
    assert live.observe({"a": {"at": 4.0}, "b": {"at": 1.0}}) == ("a", "b")


def test_a_broker_that_stopped_in_order_or_that_the_store_forgot_does_not_serve() -> None:
    live = LiveBrokers(at_most=9, clock=FakeClock())
    live.observe({"a": {"at": 5.0}, "b": {"at": 6.0}, "c": {"at": 7.0}})

    assert live.observe({"a": STOPPED, "b": {"at": 6.0}}) == ("b",)
    assert live.observe({"a": STOPPED}) == ()


def test_of_many_those_are_named_that_changed_last() -> None:
    clock = FakeClock()
    live = LiveBrokers(at_most=2, clock=clock)
    live.observe({name: {"at": 1.0} for name in "abc"})
    clock.now += 1.0

    assert live.observe({"a": {"at": 1.0}, "b": {"at": 2.0}, "c": {"at": 2.0}}) == ("b", "c")
