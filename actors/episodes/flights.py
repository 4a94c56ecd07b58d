"""The episodes an actor is working on, by task and by request.

    LEASED -> with the engine <-> with the environment -> judged -> (outbox)

A flight that was lost (another fence owns its task) is marked and removed; whoever still has it in
hand looks at the mark and lets it go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from broker.protocol.messages import Lease

from .rollout import Rollout
from .swap_gate import SwapGate


@dataclass(eq=False, slots=True)
class Flight:
    """One episode in the making."""

    lease: Lease
    started_at: float
    """Unix seconds."""
    rollout: Rollout | None = None
    """None until the environment has begun it."""
    request_id: str | None = None
    """Set while the engine has it."""
    is_lost: bool = False


class Flights:
    """All flights of one actor; those of an evaluation keep the swap gate closed."""

    def __init__(self, gate: SwapGate) -> None:
        self._gate = gate
        self._by_task: dict[int, Flight] = {}
        self._by_request: dict[str, Flight] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_task)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_task.values()))

    def get(self, task_id: int) -> Flight | None:
        """The flight of a task, if there is one."""
        return self._by_task.get(task_id)

    def of_request(self, request_id: str) -> Flight | None:
        """The flight that waits for this request; None once it does not."""
        return self._by_request.get(request_id)

    def add(self, flight: Flight) -> None:
        """Begin with a task."""
        self._by_task[flight.lease.task_id] = flight
        if flight.lease.spec.purpose == "eval":
            self._gate.enter(flight.lease.task_id)

    def board(self, flight: Flight, request_id: str) -> None:
        """Note that the engine has the flight."""
        flight.request_id = request_id
        self._by_request[request_id] = flight

    def leave_engine(self, flight: Flight) -> None:
        """Note that the engine no longer has it."""
        if flight.request_id is not None:
            self._by_request.pop(flight.request_id, None)
            flight.request_id = None
            self._changed.set()

    def remove(self, flight: Flight) -> None:
        """End the work on a flight."""
        self.leave_engine(flight)
        if self._by_task.get(flight.lease.task_id) is flight:
            del self._by_task[flight.lease.task_id]
            self._gate.leave(flight.lease.task_id)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is true of the flights; ended by a drain's deadline."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()
