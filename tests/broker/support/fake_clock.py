"""A clock that tests move."""

from __future__ import annotations


class FakeClock:
    """Time that passes when told: the classes only subtract two readings."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
