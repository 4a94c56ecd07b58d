"""The arithmetic of `python -m benchmarks.environments`."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from actors.environments.base import Step
from benchmarks.environments.__main__ import ratios
from benchmarks.environments.waiting import Awaited, Blocking


def arm(tokens_per_s, *, wait_s=1.0, in_flight=256):
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_turn": 64.0,
        "wait_s": wait_s,
        "in_flight": in_flight,
    }


def test_waiting_is_compared_with_what_can_be_made_at_all():
    arms = {
        "instant": arm(4096.0, wait_s=0.0, in_flight=64),
        "full": arm(3686.4),
        "few": arm(2048.0, in_flight=64),
    }

    found = ratios(arms)

    # A turn of 64 places takes a second: 64 in flight make half as much, 128 and more all of it.
    assert found["full_over_possible"] == pytest.approx(0.9)
    assert found["few_over_instant"] == pytest.approx(0.5)
    assert found["few_over_possible"] == pytest.approx(1.0)


def test_one_environment_awaits_and_the_other_blocks():
    awaited = Awaited(wait_s=0.0).begin(0, 0, held_out=False).step("")
    blocking = Blocking(wait_s=0.0).begin(0, 0, held_out=False).step("")

    assert inspect.iscoroutine(awaited)
    assert asyncio.run(awaited) == blocking == Step()
