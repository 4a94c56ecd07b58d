"""Pace of a source in one pull; that of a peer is held against the publisher's.

A peer of a site passes on what itself gets over a link that may be slow, so that no fixed rate
tells a slow link from a peer that holds others up. Where a peer is behind, the publisher is asked
for one of the slices: the peer may take twice as long as the publisher for each, and `SLACK_S` for
all of them. Pure, with a given clock.
"""

from __future__ import annotations

from collections.abc import Callable

SLACK_S = 10.0
"""For which a peer may be behind: it lost its own source, or was not told of the version yet."""
SLICE_S = 1.0
"""Time for a slice up to which nothing is measured: 4 MB/s."""
SHARE = 2
"""Of the publisher's time for a slice: it is measured while others use the link, too."""


class Pace:
    """Counts what a source has brought, and decides whether a peer may go on.

    Example:
        brought() ... is_behind -> ask() -> the publisher's answer -> measure() -> is_behind?
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self.brought_at = clock()
        self._slices = 0
        self._slice_s = SLICE_S
        self._asked_at: float | None = None
        self._asked_for = 0
        self.can_measure = True
        """False once the publisher has left a question unanswered, or has no such slice."""
        self.has_promised = False

    def brought(self) -> None:
        """Count a slice of the source."""
        self._slices += 1
        self.brought_at = self._clock()

    @property
    def is_behind(self) -> bool:
        """True if it has taken longer than it may for what it has brought."""
        may_take_s = SLACK_S + self._slice_s * self._slices
        return self._clock() - self._began_at > may_take_s

    @property
    def is_measuring(self) -> bool:
        """True from `ask` to `measure`."""
        return self._asked_at is not None

    @property
    def measuring_s(self) -> float:
        """Seconds for which the publisher has been asked."""
        return 0.0 if self._asked_at is None else self._clock() - self._asked_at

    def is_asked_for(self, offset: int) -> bool:
        """Return whether the publisher is asked for this slice."""
        return self.is_measuring and offset == self._asked_for

    def ask(self, offset: int) -> None:
        """Note that the publisher is asked for a slice."""
        self._asked_at, self._asked_for = self._clock(), offset

    def measure(self) -> None:
        """Note its answer."""
        assert self._asked_at is not None
        self._slice_s = max(SLICE_S, SHARE * (self._clock() - self._asked_at))
        self._asked_at = None

    def give_up(self) -> None:
        """Measure no more: the peer is waited for as one is that nothing can be held against."""
        self._asked_at, self.can_measure = None, False
