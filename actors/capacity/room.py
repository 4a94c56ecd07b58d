"""The number of episodes that an actor may have at a time."""

from __future__ import annotations

import asyncio

from broker.protocol.messages import MAX_LINES


def leases_for(slots: int, in_flight: int | None = None) -> int:
    """Return how many leases keep so many places of an engine full.

    A few wait for a place in the engine: one that becomes free is taken in the very next step.
    """
    return min(MAX_LINES, in_flight or slots + slots // 16)


class Room:
    """A bound on episodes, generated or waiting for their environment; it may change.

    Args:
        most: Of them.
        group_size: Of the run.
    """

    def __init__(self, most: int, *, group_size: int) -> None:
        self.most = most
        self._group_size = group_size
        self._changed = asyncio.Event()

    @property
    def full_from(self) -> int:
        """From this number on none is asked for.

        Whole groups come together where they fit, and share their prompt in the prefix cache.
        """
        return self.most - max(1, min(self._group_size, self.most // 4)) + 1

    def resize(self, most: int) -> None:
        """Change the bound; those that are beyond it go on."""
        self.most = most
        self._changed.set()

    async def other_than(self, most: int) -> None:
        """Wait until the bound is another one."""
        while self.most == most:
            self._changed.clear()
            await self._changed.wait()
