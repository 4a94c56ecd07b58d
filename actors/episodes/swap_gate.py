"""Gate that holds new weights back while evaluations run.

An evaluation is to be made by one policy. While the actor works on one, a swap waits, but never
longer than `actors.eval_hold_s`: then the version spans of the evaluation show the change.
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

    def begin_evaluation(self, task_id: int) -> None:
        """Close the gate for an evaluation episode."""
        self._running.add(task_id)
        self._open.clear()

    def end_evaluation(self, task_id: int) -> None:
        """Open the gate if this was the last one. Idempotent; ids of other episodes are ignored."""
        self._running.discard(task_id)
        if not self._running:
            self._open.set()

    async def wait(self) -> None:
        """Wait until the gate is open, at most for the longest time it may stay closed."""
        try:
            async with asyncio.timeout(self._hold_s):
                await self._open.wait()
        except TimeoutError:
            log.warning("evaluation changes weights midway", episodes=len(self._running))
