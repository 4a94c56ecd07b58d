"""The episode loop of one actor.

    JOIN --hello--> SYNC --weights are current--> SERVING --DONE, or stop--> DRAINING --> BYE

Consumes leases and the engine's tokens; produces records. Its tasks, each with one wait:

| task | waits for | unblocked by |
| --- | --- | --- |
| lease | room, then the broker's long poll | finished flights; work, DONE or a stop |
| pump | `engine.deltas` | tokens, or the engine's death |
| judge, score | ended turns, finished episodes | `Finishing`'s queues, within time limits |
| deliver | the outbox | finished episodes, then the broker |
| beat | the clock, then the broker | never waits for the engine |
| weights | the publisher | `WeightReceiver` |

A broker that is gone stops nothing at once: what is in flight goes on, calls are repeated for
`GIVE_UP_S`, and then the actor ends with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import structlog

from actors.engine.engine import Engine
from actors.episodes.environment_thread import Workbench
from actors.episodes.flights import Flights
from actors.episodes.heartbeat import Heartbeat
from actors.episodes.interfaces import Broker, Weights
from actors.episodes.maker import EpisodeMaker
from actors.episodes.meter import Meter
from actors.episodes.outbox import Outbox
from actors.episodes.sampling import Sampling
from actors.episodes.swap_gate import SwapGate
from actors.rewards.pool import RewardPool
from broker.protocol.messages import (
    Hello,
    Lease,
    LeaseReply,
    LeaseRequest,
    Publication,
    ReleaseRequest,
)
from configs.errors import DeadlineError, NyalaError
from configs.settings import Settings

GIVE_UP_S = 600.0  # a broker is restarted in seconds, its machine in minutes
UNACKED_PER_SLOT = 2  # finished episodes for each place in the engine before leasing stops
LAST_WORDS_S = 2.0  # to give leases back after a failure, and for BYE
MAX_RELEASES = 1024  # leases of one message: a quarter of what the broker takes
DIRTY_PAUSE_S = 0.02  # a swap and its probe take tens of milliseconds

log = structlog.get_logger()
T = TypeVar("T")


class Phase(StrEnum):
    """Where an actor is in its life."""

    JOIN = "join"
    SYNC = "sync"
    SERVING = "serving"
    DRAINING = "draining"
    BYE = "bye"


@dataclass(frozen=True, slots=True)
class Crew:
    """What the loop works with once an actor has started up."""

    maker: EpisodeMaker
    rewards: RewardPool | None


class ActorLoop:
    """One incarnation of an actor.

    Example:
        loop = ActorLoop(settings, hello, broker=client, engine=engine, weights=receiver,
                         gate=gate, prepare=prepare)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.stop)
        await loop.run()
    """

    def __init__(
        self,
        settings: Settings,
        hello: Hello,
        *,
        broker: Broker,
        engine: Engine,
        weights: Weights,
        gate: SwapGate,
        prepare: Callable[[], Awaitable[Crew]],
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        """Connect the parts; nothing runs yet.

        Args:
            settings: Of the run.
            hello: How this incarnation introduces itself.
            broker: Client of the run's broker.
            engine: Not started yet.
            weights: Keeps the engine current.
            gate: Holds swaps back; the receiver has it too.
            prepare: Makes environment, tokenizer and reward, while the engine starts.
            give_up_s: How long a silent broker is borne.
        """
        self.phase = Phase.JOIN
        self._group_size = settings.run.group_size
        self._capacity = hello.capacity
        self._drain_s = settings.actors.drain_s
        self._hello = hello
        self._broker = broker
        self._engine = engine
        self._weights = weights
        self._prepare = prepare
        self._give_up_s = give_up_s
        self._stop = asyncio.Event()
        self._publication: Publication | None = None
        self._published = asyncio.Event()
        self._flights = Flights(gate)
        self._outbox = Outbox(
            broker,
            deadline_s=give_up_s,
            max_message_bytes=settings.broker.max_message_bytes,
        )
        self._meter = Meter(time.monotonic)
        self._heartbeat = Heartbeat(
            broker,
            settings.actors,
            version=lambda: engine.version,
            stats=self._stats,
            on_lost=self._lose,
            on_publication=self._see,
            deadline_s=give_up_s,
        )
        self._snapshots = self._heartbeat.snapshots
        self._sampling = Sampling(
            engine,
            Workbench(timeout_s=settings.run.reward_timeout_s),
            flights=self._flights,
            snapshots=self._snapshots,
            outbox=self._outbox,
            meter=self._meter,
        )

    def stop(self) -> None:
        """Drain and end; may be called again."""
        self._stop.set()

    async def run(self) -> None:
        """Live from JOIN to BYE.

        Raises:
            NyalaError: The first failure of any task; leases are given back where that is possible.
        """
        crew: Crew | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                services: list[asyncio.Task[None]] = []
                crew = await unless(self._start_up(tasks, services), self._stop.wait())
                if crew is not None:
                    services += self._start_work(crew, tasks)
                    await unless(self._lease(crew.maker), self._stop.wait())
                    await self._drain()
                for service in services:
                    service.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            await self._leave(crew)

    async def _start_up(self, tasks: asyncio.TaskGroup, services: list[asyncio.Task[None]]) -> Crew:
        """Join, load, then wait for the current weights."""
        log.info("starting", stage="joining the run")
        welcome = await self._broker.hello(self._hello, deadline_s=self._give_up_s)
        self._see(welcome.publication)
        services.append(tasks.create_task(self._heartbeat.run()))
        log.info("starting", stage="loading the environment")
        crew = await self._prepare()
        # Not beside `prepare`: transformers' lazy imports break when two threads meet in them.
        log.info("starting", stage="loading the engine")
        await self._engine.start()
        self.phase = Phase.SYNC
        log.info("starting", stage="waiting for weights")
        services.append(tasks.create_task(self._weights.run()))
        version = await self._weights.first_sync(await self._first_publication())
        log.info("serving", stage="sampling", lineage=version.lineage, step=version.step)
        return crew

    async def _first_publication(self) -> Publication:
        try:
            async with asyncio.timeout(self._give_up_s):
                await self._published.wait()
        except TimeoutError:
            raise DeadlineError(
                f"weights must be published within {self._give_up_s:g} s, got none; "
                "is the learner running?"
            ) from None
        assert self._publication is not None
        return self._publication

    def _start_work(self, crew: Crew, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        self.phase = Phase.SERVING
        finishing = self._sampling.finishing
        scorers = range(1 if crew.rewards is None else crew.rewards.num_workers)
        return [
            tasks.create_task(self._sampling.pump()),
            tasks.create_task(finishing.judge_turns()),
            *(
                tasks.create_task(finishing.score_episodes(crew.maker, crew.rewards))
                for _ in scorers
            ),
            tasks.create_task(self._sampling.deliver()),
        ]

    async def _lease(self, maker: EpisodeMaker) -> None:
        """Keep the engine full until the run has ended."""
        # Whole groups come together where they fit, and share their prompt in the prefix cache.
        enough = max(1, min(self._group_size, self._capacity // 4))
        while True:
            await self._flights.until(lambda: self._capacity - len(self._flights) >= enough)
            await self._outbox.until_below(UNACKED_PER_SLOT * self._capacity)
            if self._weights.is_dirty:
                await asyncio.sleep(DIRTY_PAUSE_S)
                continue
            request = LeaseRequest(self._capacity - len(self._flights), self._engine.version)
            # The broker judges by the version it was told: newer weights may be let in at once.
            reply = await unless(
                self._ask(request),
                self._weights.newer_than(request.version),
            )
            if reply is None:
                continue
            self._see(reply.publication)
            if reply.status == "DONE":
                log.info("the run has ended")
                return
            if reply.leases:
                await self._sampling.begin(maker, reply.leases)
            else:
                await asyncio.sleep(reply.retry_after_s)

    async def _ask(self, request: LeaseRequest) -> LeaseReply:
        """Ask for leases and hold them at once: a drain that comes now gives them back."""
        reply = await self._broker.lease(request, deadline_s=self._give_up_s)
        for lease in reply.leases:
            self._snapshots.hold(lease)
        return reply

    async def _drain(self) -> None:
        """Finish what has all its tokens, give the rest back."""
        self.phase = Phase.DRAINING
        log.info("draining", in_flight=len(self._flights), unacked=len(self._outbox))
        try:
            async with asyncio.timeout(self._drain_s / 2):
                await self._sampling.stop()
                await self._flights.until(lambda: len(self._flights) == 0)
                await self._outbox.until_below(1)
        except TimeoutError:
            log.warning("episodes are given back unjudged", episodes=len(self._snapshots))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s / 2):
                await self._give_back()

    async def _give_back(self) -> None:
        await self._heartbeat.say_last()
        leases = self._snapshots.leases()
        for start in range(0, len(leases), MAX_RELEASES):
            request = ReleaseRequest(tuple(leases[start : start + MAX_RELEASES]))
            await self._broker.release(request, deadline_s=self._give_up_s)
        for task_id, fence in leases:
            self._snapshots.let_go(task_id, fence)

    async def _leave(self, crew: Crew | None) -> None:
        """Give back what is left, say BYE, and end the engine and the reward's process."""
        self.phase = Phase.BYE
        with suppress(TimeoutError, NyalaError):
            async with asyncio.timeout(LAST_WORDS_S):
                if len(self._snapshots):
                    await self._give_back()
                await self._broker.bye(deadline_s=LAST_WORDS_S)
        if crew is not None and crew.rewards is not None:
            await crew.rewards.close()
        await self._engine.close()

    def _see(self, publication: Publication | None) -> None:
        if publication is not None:
            self._publication = publication
            self._published.set()
            self._weights.offer(publication)

    def _lose(self, lease: Lease) -> None:
        self._sampling.lose(lease)

    def _stats(self) -> dict[str, float]:
        return self._meter.report(
            in_flight=len(self._flights),
            unacked=len(self._outbox),
            finished=self._sampling.finishing.num_finished,
        )


async def unless(work: Coroutine[Any, Any, T], event: Coroutine[Any, Any, object]) -> T | None:
    """Do something unless an event comes first, then cancel it and return None."""
    task, other = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, other):
            each.cancel()
        await asyncio.gather(task, other, return_exceptions=True)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that a person can act on, else the first."""
    ours, rest = group.split(NyalaError)
    found: BaseException = ours or rest or group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
