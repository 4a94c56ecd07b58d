"""Jumps of the machine's clock."""

from __future__ import annotations

from console.chaos.case import Case
from console.chaos.fault import Fault


def _unavailable() -> str | None:
    return "it would move the clock of the whole machine; the simulator's tests jump it instead"


def jump(case: Case) -> None:
    """Never called: a clock cannot be moved for one run alone."""
    raise AssertionError(case)


FAULTS = (Fault("clock-jump", "clock jumps", jump, _unavailable),)
