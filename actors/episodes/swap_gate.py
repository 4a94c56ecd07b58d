"""New weights wait while evaluations run.

An evaluation is to be made by one policy. While the actor holds leases of one, a swap waits, but
never longer than `actors.eval_hold_s`: then the evaluation's version spans tell what happened.
"""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger()


class SwapGate:
    """Open while no evaluation runs."""

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._running: set[int] = set()
        self._open = asyncio.Event()
        self._open.set()

    def enter(self, task_id: int) -> None:
        """An evaluation episode begins."""
        self._running.add(task_id)
        self._open.clear()

    def leave(self, task_id: int) -> None:
        """It has all its tokens, or was lost; other episodes may say so too."""
        self._running.discard(task_id)
        if not self._running:
            self._open.set()

    async def passed(self) -> None:
        """Wait for the gate to open, or for the longest time it may stay closed."""
        try:
            async with asyncio.timeout(self._hold_s):
                await self._open.wait()
        except TimeoutError:
            log.warning("evaluation changes weights midway", episodes=len(self._running))
