"""From leases to the engine, and from its tokens to ended turns.

    lease --begin--> with the engine --pump--> turn ended --> Finishing --> outbox --deliver--> gone
                          ^                        |
                          +------- next turn ------+

Every held lease is in the snapshots until its record is acknowledged, so that it is kept alive
whatever its episode waits for.
"""

from __future__ import annotations

import time

import structlog

from actors.engine.engine import Delta, Engine
from broker.protocol.messages import Lease, Verdict

from .environment_thread import Workbench
from .flights import Flight, Flights
from .held_leases import Snapshots
from .maker import EpisodeMaker
from .meter import Meter
from .outbox import Outbox
from .rollout import State
from .scoring import Finishing

log = structlog.get_logger()

WHOLE_TURN = (None, "stop", "length")
"""Finish reasons of tokens that the policy alone chose; any other cuts a turn where it did not."""


class Sampling:
    """Moves flights between engine, environment and outbox."""

    def __init__(
        self,
        engine: Engine,
        bench: Workbench,
        *,
        flights: Flights,
        snapshots: Snapshots,
        outbox: Outbox,
        meter: Meter,
    ) -> None:
        self._engine = engine
        self._bench = bench
        self._flights = flights
        self._snapshots = snapshots
        self._outbox = outbox
        self._meter = meter
        self._is_stopped = False
        self.finishing = Finishing(bench, flights=flights, outbox=outbox, go_on=self._board)

    async def begin(self, maker: EpisodeMaker, leases: tuple[Lease, ...]) -> None:
        """Begin or continue the episodes of these leases."""
        flights = [Flight(lease, time.time()) for lease in leases]
        for flight in flights:
            older = self._flights.get(flight.lease.task_id)
            if older is not None:
                self._lose(older)
            self._flights.add(flight)
            self._snapshots.hold(flight.lease)
        results = await self._bench.map(maker.begin, leases)
        boarding: list[Flight] = []
        for flight, result in zip(flights, results, strict=True):
            if flight.is_lost:
                continue
            if isinstance(result, Exception):
                self.finishing.fail(flight, "data", f"{type(result).__name__}: {result}")
                continue
            flight.rollout = result
            self._snapshots.watch(result)
            if result.state is State.SAMPLING:
                boarding.append(flight)
            else:
                self.finishing.turned(flight)
        self._board(boarding)

    async def pump(self) -> None:
        """Append the engine's tokens to their episodes, until cancelled."""
        has_begun = False
        while True:
            for delta in await self._engine.deltas():
                if delta.token_ids and not has_begun:
                    has_begun = True
                    newest = delta.versions[-1].version
                    log.info("first tokens", lineage=newest.lineage, step=newest.step)
                flight = self._flights.of_request(delta.request_id)
                if flight is not None:
                    self._take(flight, delta)

    async def deliver(self) -> None:
        """Send records and failures; a lease ends with its acknowledgement."""
        while True:
            for parcel, verdict in await self._outbox.deliver():
                self._snapshots.let_go(parcel.task_id, parcel.fence)
                if verdict.verdict in (Verdict.STALE, Verdict.GONE):
                    self._meter.num_lost += 1

    def lose(self, lease: Lease) -> None:
        """Stop an episode at once that another actor has by now."""
        flight = self._flights.get(lease.task_id)
        if flight is not None and flight.lease.fence == lease.fence:
            self._lose(flight)

    async def stop(self) -> None:
        """Stop sampling; what has all its tokens is still judged and delivered.

        Raises:
            EngineError: The engine died.
        """
        self._is_stopped = True
        for delta in await self._engine.halt():
            flight = self._flights.of_request(delta.request_id)
            if flight is not None:
                self._take(flight, delta)
        for flight in self._flights:
            if flight.request_id is not None or flight.rollout is None:
                self._flights.remove(flight)

    def _board(self, flights: list[Flight]) -> None:
        """Give flights to the engine; once stopped they wait for their release instead."""
        requests = []
        for flight in flights:
            assert flight.rollout is not None
            if self._is_stopped:
                self._flights.remove(flight)
                continue
            requests.append(flight.rollout.request())
            self._flights.board(flight, requests[-1].request_id)
        if requests:
            self._engine.submit(requests)

    def _take(self, flight: Flight, delta: Delta) -> None:
        assert flight.rollout is not None
        if delta.finish_reason is not None:
            self._flights.leave_engine(flight)
        if delta.finish_reason not in WHOLE_TURN:
            reason = f"the engine broke it off: {delta.finish_reason!r}"
            self.finishing.fail(flight, "infrastructure", reason)
            return
        self._meter.count(len(delta.token_ids))
        flight.rollout.take(delta)
        if delta.finish_reason is not None:
            self.finishing.turned(flight)

    def _lose(self, flight: Flight) -> None:
        """Stop at once: another actor has this episode."""
        flight.is_lost = True
        self._meter.num_lost += 1
        if flight.request_id is not None:
            self._engine.abort([flight.request_id])
        self._flights.remove(flight)
