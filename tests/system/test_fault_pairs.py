"""Pairs of faults: which are drawn, and how two faults are made to begin and recover together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from configs.worker import Worker
from lab.fault_case import Fault, FaultCase
from lab.live_run import ExpectationFailed
from lab.pair_case import KINDS, NUM_PAIRS, draw_pairs, inject_both
from tests.waiting import wait_until


class StandIn:
    """A run that is always well: what the faults' steps need of it."""

    log = "the log"
    step = 7

    def __init__(self) -> None:
        self.sleep: Callable[[float], None] = time.sleep
        self.settings = SimpleNamespace(actors=SimpleNamespace(snapshot_s=0.1))
        self.fleet = SimpleNamespace(refill=lambda: None)

    def pids(self, _role: str) -> list[int]:
        self.step += 1
        return [1]

    def until(
        self,
        condition: Callable[[], object],
        what: str,
        limit_s: float = 5.0,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            look()
            if condition():
                return
            assert time.monotonic() < deadline, what
            self.sleep(0.001)


def run_pair(first: Callable[[FaultCase], None], second: Callable[[FaultCase], None]) -> FaultCase:
    run: Any = StandIn()
    case = FaultCase(run)
    try:
        inject_both(
            case,
            Fault("first", "first", first),
            Fault("second", "second", second),
            delay_s=0.0,
        )
    finally:
        assert run.sleep is time.sleep
    return case


def test_both_are_prepared_before_either_begins_and_both_have_ended_before_recovery() -> None:
    order: list[str] = []

    def fault(name: str) -> Callable[[FaultCase], None]:
        def act(case: FaultCase) -> None:
            order.append(f"{name} prepares")
            case.run.sleep(0.01)
            case.inject(lambda: order.append(f"{name} begins"), lambda: True)
            case.pause(0.01)
            case.lift(lambda: order.append(f"{name} ends"))
            case.recover()
            order.append(f"{name} recovered")
            case.remark = name

        return act

    case = run_pair(fault("a"), fault("b"))

    def places(word: str) -> list[int]:
        return [place for place, text in enumerate(order) if word in text]

    assert order[:2] == ["a prepares", "b prepares"]
    assert max(places("prepares")) < min(places("begins"))
    assert max(places("ends")) < min(places("recovered"))
    assert len(order) == 8
    assert case.remark == "a; b"
    assert case.detected_s is not None and case.recovered_s is not None


def test_what_ends_one_fault_ends_the_pair_and_is_named() -> None:
    def stuck(case: FaultCase) -> None:
        case.inject(lambda: None)
        raise ExpectationFailed("the learner must come back")

    def waits(case: FaultCase) -> None:
        case.inject(lambda: None)
        case.recover()

    for pair in ((stuck, waits), (waits, stuck)):
        with pytest.raises(ExpectationFailed, match="the learner must come back"):
            run_pair(*pair)


def test_a_pair_that_is_ended_from_outside_ends_its_faults_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C and SIGTERM raise where the faults are waited for: nobody may go on with the run."""
    looks: list[float] = []

    def waits(case: FaultCase) -> None:
        case.until(lambda: looks.append(time.monotonic()), "what never comes")

    def ended(self: Worker, _timeout_s: float | None = None) -> None:
        monkeypatch.undo()
        wait_until(lambda: looks)
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "join", ended)
    with pytest.raises(KeyboardInterrupt):
        run_pair(waits, waits)
    seen = len(looks)
    time.sleep(0.1)

    assert len(looks) == seen


def test_pairs_are_the_same_for_a_seed_and_meet_every_two_kinds_that_go_together() -> None:
    pairs = draw_pairs(3)
    kind_of = {name: kind for kind, names in enumerate(KINDS) for name in names}
    met = Counter(
        tuple(sorted(kind_of[name] for name in fault.name.split(".")[1:])) for fault in pairs
    )

    assert [pair.name for pair in draw_pairs(3)] == [pair.name for pair in pairs]
    assert [pair.name for pair in draw_pairs(4)] != [pair.name for pair in pairs]
    assert len({pair.name for pair in pairs}) == NUM_PAIRS
    assert len(met) == 27  # of 28; a rewind and a failover exchange the log of the same server
    assert {"actors-kill-all", "clock-backwards", "checkpoint-disk-full"} <= {
        name for pair in pairs for name in pair.name.split(".")
    }
