"""Episode loop of one actor.

    JOIN --hello--> SYNC --weights are current--> SERVING --DONE, or stop--> DRAINING --> BYE

Consumes leases and the engine's tokens; produces records. Its tasks, each with one wait:

| task | waits for | unblocked by |
| --- | --- | --- |
| lease | room, then the broker's long poll | closed leases; work, DONE or a stop |
| pump | `engine.deltas` | tokens, or the engine's death |
| environment | its threads or event loop | begun episodes, judged turns, within a time limit |
| score | finished episodes | `Scoring`'s queue, within time limits |
| groups | finished episodes | the rest of their group, or a time limit |
| next turns | episodes that go on | `Scoring`'s queue |
| hear agents | the broker's long poll | calls of live agents, or a new conversation |
| answer agents | replies that wait | ended turns, then the broker |
| deliver | the outbox | finished episodes, then the broker |
| beat | the clock, then the broker | never waits for the engine |
| weights | the publisher | `WeightReceiver` |
| tuner | the clock | only with a tuned number of episodes (`capacity.py`) |

A broker that is gone stops nothing at once: active episodes go on, calls are repeated for
`GIVE_UP_S`, and then the actor ends with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import structlog

from actors.engine.engine import Engine
from actors.environments.calls import EnvironmentSource
from actors.episodes.agent_mail import AgentMail
from actors.episodes.environment_workers import EnvironmentWorkers
from actors.episodes.heartbeat import PUNCTUALITY, Heartbeat
from actors.episodes.held_leases import HeldLeases, SwapGate
from actors.episodes.interfaces import BrokerApi, Weights
from actors.episodes.maker import EpisodeMaker
from actors.episodes.outbox import Outbox
from actors.episodes.sampling import Sampling
from actors.episodes.scoring import Scoring
from actors.rewards.pool import RewardPool
from broker.protocol.messages import (
    MAX_LINES,
    Hello,
    LeaseReply,
    LeaseRequest,
    Publication,
    ReleaseRequest,
)
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, NyalaError, first_error
from configs.settings import ActorSettings, RunSettings

from .capacity import CacheMeter, ConcurrencyLimit, Tuner

# --------------------------------------------------------------------------------------------------
# Work that an event may end.

T = TypeVar("T")


async def until_event(work: Coroutine[Any, Any, T], event: Coroutine[Any, Any, object]) -> T | None:
    """Return the result of work; None if the event comes first, and the work is cancelled.

    What the work raises is raised; what the event raises counts as the event.
    """
    task, other = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for unfinished in (task, other):
            unfinished.cancel()
        await asyncio.gather(task, other, return_exceptions=True)


# --------------------------------------------------------------------------------------------------
# Episode loop of one actor.

GIVE_UP_S = 600.0  # a broker is restarted in seconds, its machine in minutes
AWAY_PER_SLOT = 4  # live agents between two calls, for each place: they sample a part of their time
UNACKED_PER_SLOT = 2  # finished episodes for each place in the engine before leasing stops
GROUP_WAIT_S = 60.0  # half of the time that a lease may stand still
LEAVE_S = 2.0  # to release leases after a failure, and for BYE
DRAIN_SHARE = (
    0.4  # of `actors.drain_s`, to finish and then to release; the rest is for BYE and the end
)
GONE_SHARE = 0.2  # of `actors.drain_s`, without a connection: the broker was told to stop too
MAX_RELEASES = 1024  # leases of one message: a quarter of what the broker takes
DIRTY_PAUSE_S = 0.02  # a swap and its probe take tens of milliseconds

log = structlog.get_logger()


class ActorPhase(StrEnum):
    """Phases of one incarnation."""

    JOIN = "join"
    SYNC = "sync"
    SERVING = "serving"
    DRAINING = "draining"
    BYE = "bye"


@dataclass(frozen=True, slots=True)
class EpisodeTools:
    """Environments, tokenizer and rewards, made while an actor starts up."""

    maker: EpisodeMaker
    environments: Sequence[EnvironmentSource]
    """In the order of the settings."""
    rewards: Sequence[RewardPool | None]
    """Reward functions of each environment, maybe shared; None = the environment's own score."""


async def _wait_to_join(joining: asyncio.Task[None]) -> None:
    """Wait until the actor has joined its run, and log the wait."""
    if not joining.done():
        log.info("starting", stage="joining the run")
    await joining


def _empty_table(gate: SwapGate, actors: ActorSettings) -> HeldLeases:
    return HeldLeases(
        gate,
        heartbeat_s=PUNCTUALITY * actors.heartbeat_s,
        snapshot_s=PUNCTUALITY * actors.snapshot_s,
        clock=time.monotonic,
    )


class ActorLoop:
    """One incarnation of an actor.

    Example:
        loop = ActorLoop(hello, run=settings.run, actors=settings.actors, max_message_bytes=2**25,
                         broker=client, engine=engine, weights=receiver, gate=gate, prepare=prepare)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.stop)
        await loop.run()
    """

    def __init__(
        self,
        hello: Hello,
        *,
        run: RunSettings,
        actors: ActorSettings,
        max_message_bytes: int,
        broker: BrokerApi,
        engine: Engine,
        weights: Weights,
        gate: SwapGate,
        prepare: Callable[[], Awaitable[EpisodeTools]],
        meter: CacheMeter | None = None,
        group_wait_s: float = GROUP_WAIT_S,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        """Connect the parts; nothing runs yet.

        Args:
            hello: Identity and settings of this incarnation, for the broker.
            run: Settings of the run.
            actors: Settings of the actors.
            max_message_bytes: Largest message to the broker.
            broker: Client of the run's broker.
            engine: Not started yet.
            weights: Keeps the engine current.
            gate: Holds swaps back; the receiver has it too.
            prepare: Makes environment, tokenizer and reward, before the engine starts. If it fails
                before the run has begun, it is called again after that.
            meter: State of the engine's KV cache, for tuning; None = the number of episodes is
                fixed.
            group_wait_s: Longest wait of an episode for its group, where a reward judges it whole.
            give_up_s: Longest silence of the broker.
        """
        self.phase, self._hello, self._prepare = ActorPhase.JOIN, hello, prepare
        self._stop, self._published = asyncio.Event(), asyncio.Event()
        self._is_broker_gone = False
        self.room = room = ConcurrencyLimit(hello.capacity, group_size=run.group_size)
        self._tuner = None if meter is None else Tuner(self.room, actors, meter)
        self._drain_s, self._give_up_s, self._group_wait_s = actors.drain_s, give_up_s, group_wait_s
        self._broker, self._engine, self._weights = broker, engine, weights
        self._publication: Publication | None = None
        self._outbox = Outbox(broker, deadline_s=give_up_s, max_message_bytes=max_message_bytes)
        self._leases = leases = _empty_table(gate, actors)
        self._environment = calls = EnvironmentWorkers(actors)
        self._scoring = Scoring(calls, leases=leases, outbox=self._outbox)
        mail = AgentMail(broker, engine, leases, deadline_s=give_up_s)
        self.sampling = Sampling(
            engine, calls, self._scoring, leases=leases, outbox=self._outbox, mail=mail, room=room
        )
        self.heartbeat = Heartbeat(
            broker,
            engine,
            self.sampling,
            leases=leases,
            settings=actors,
            on_publication=self._follow_publication,
            of_weights=lambda: weights.figures,
            deadline_s=give_up_s,
        )

    def stop(self) -> None:
        """Let `run` drain and end, within about `actors.drain_s`; may be called again."""
        self._stop.set()

    async def run(self) -> None:
        """Run from JOIN to BYE; ends the engine and the rewards' processes.

        A drain delivers finished episodes and releases the others with their tokens. What the
        broker has not taken by then expires.

        Raises:
            NyalaError: The first failure of any task; leases are released where that is possible.
        """
        tools: EpisodeTools | None = None
        has_failed = True
        try:
            async with asyncio.TaskGroup() as tasks:
                services: list[asyncio.Task[None]] = []
                tools = await until_event(self._start_up(tasks, services), self._stop.wait())
                if tools is not None:
                    services += self._start_work(tools, tasks)
                    await until_event(self._lease(tools), self._stop.wait())
                    await self._drain()
                for service in services:
                    service.cancel()
            has_failed = False
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            await self._leave(tools, has_failed=has_failed)

    async def _start_up(
        self, tasks: asyncio.TaskGroup, services: list[asyncio.Task[None]]
    ) -> EpisodeTools:
        """Load, join meanwhile, then wait for the current weights."""
        joining = tasks.create_task(self._join(tasks, services))
        services.append(joining)
        log.info("starting", stage="loading the environment")
        try:
            tools = await self._prepare()
        except NyalaError as error:
            if joining.done():
                raise
            # A run that has not begun may have no model yet, on a disk that machines share.
            log.warning("waiting for the run, then loading again", reason=str(error))
            await _wait_to_join(joining)
            tools = await self._prepare()
        # Not beside `prepare`: transformers' lazy imports break when two threads meet in them.
        log.info("starting", stage="loading the engine")
        await self._engine.start()
        await _wait_to_join(joining)
        self.phase = ActorPhase.SYNC
        log.info("starting", stage="waiting for weights")
        services.append(tasks.create_task(self._weights.run()))
        version = await self._weights.first_sync(await self._first_publication())
        log.info("serving", stage="sampling", lineage=version.lineage, step=version.step)
        return tools

    async def _join(self, tasks: asyncio.TaskGroup, services: list[asyncio.Task[None]]) -> None:
        """Join the run; its broker answers once the learner has begun it."""
        welcome = await self._broker.hello(self._hello, deadline_s=self._give_up_s)
        self._follow_publication(welcome.publication)
        services.append(tasks.create_task(self.heartbeat.run()))

    async def _first_publication(self) -> Publication:
        try:
            async with asyncio.timeout(self._give_up_s):
                await self._published.wait()
        except TimeoutError:
            raise DeadlineError(
                f"weights must be published within {self._give_up_s:g} s, got none; start the "
                "learner, or look at its log"
            ) from None
        assert self._publication is not None
        return self._publication

    def _start_work(
        self, tools: EpisodeTools, tasks: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        self.phase = ActorPhase.SERVING
        self._environment.open(tools.environments)
        scorers = [
            self._scoring.score_episodes(tools.maker, environment, rewards)
            for environment, rewards in enumerate(tools.rewards)
            for _ in range(1 if rewards is None else rewards.num_workers)
        ]
        gatherers = [
            self._scoring.gather_groups(
                environment,
                rewards.group_size,
                wait_s=self._group_wait_s,
                most=lambda: UNACKED_PER_SLOT * self.room.most + self.room.group_size,
            )
            for environment, rewards in enumerate(tools.rewards)
            if rewards is not None and rewards.group_size is not None
        ]
        work = [
            self.sampling.pump(),
            self.sampling.begin_turns(),
            self.sampling.deliver(),
            self.sampling.hear_agents(),
            self.sampling.answer_agents(),
            self._environment.serve(),
            *scorers,
            *gatherers,
        ]
        if self._tuner is not None:
            work.append(self._tuner.run(self.sampling.seen))
        return [tasks.create_task(coroutine) for coroutine in work]

    async def _lease(self, tools: EpisodeTools) -> None:
        """Keep the engine full until the run has ended."""
        is_grouped = any(pool is not None and pool.group_size for pool in tools.rewards)
        room, leases = self.room, self._leases
        while True:
            await self._outbox.until_below(UNACKED_PER_SLOT * room.most)
            most, full_from = room.most, room.full_from
            away = AWAY_PER_SLOT * most
            if leases.num_active >= full_from or leases.num_away >= away:
                has_room = leases.until_active_below(full_from, away=away)
                await until_event(has_room, room.other_than(most))
                continue
            room_left = MAX_LINES - len(leases)  # of a message that names all
            if self._weights.is_dirty or room_left <= 0:
                await asyncio.sleep(DIRTY_PAUSE_S)
                continue
            free, version = min(most - leases.num_active, room_left), self._engine.version
            # Tasks for which no agent has called may wait for places at hosts, which are full of
            # agents whose actors have died: those tasks are taken beyond the limit.
            if begun_only := leases.num_with_agents >= away:
                free = min(free, away - leases.num_away)
            else:
                free = min(free, away - leases.num_with_agents)
            takes_over = not is_grouped and not begun_only
            request = LeaseRequest(free, version, takes_over=takes_over, begun_only=begun_only)
            # The broker decides by the version of the request: newer weights may be let in at once.
            is_outdated = self._until_outdated(version, most)
            if begun_only:
                is_outdated = until_event(is_outdated, leases.until_with_agents_below(away))
            reply = await until_event(self._ask(request), is_outdated)
            if reply is None:
                continue
            self._follow_publication(reply.publication)
            if reply.status == "DONE":
                log.info("the run has ended")
                return
            if reply.leases:
                self.sampling.begin_episodes(tools.maker)
            else:
                await asyncio.sleep(reply.retry_after_s)

    async def _until_outdated(self, version: PolicyVersion, most: int) -> None:
        await until_event(self._weights.newer_than(version), self.room.other_than(most))

    async def _ask(self, request: LeaseRequest) -> LeaseReply:
        """Request leases and hold them at once: a drain that comes now releases them."""
        reply = await self._broker.lease(request, deadline_s=self._give_up_s)
        self.sampling.hold(reply.leases)
        return reply

    async def _drain(self) -> None:
        """Finish episodes that have all their tokens, release the others."""
        self.phase = ActorPhase.DRAINING
        log.info("draining", in_flight=self._leases.num_active, unacked=len(self._outbox))
        is_gone = self._broker.until_gone(GONE_SHARE * self._drain_s)
        if not await until_event(self._give_back(), is_gone):
            self._is_broker_gone = True
            log.info(
                "the broker stopped before this actor", leases_left_to_expire=len(self._leases)
            )

    async def _give_back(self) -> bool:
        """Deliver what is done and release the rest; whether the broker has taken it."""
        try:
            async with asyncio.timeout(DRAIN_SHARE * self._drain_s):
                await self.sampling.stop()
                await self._leases.until_active_below(1)
                await self._outbox.until_below(1)
        except TimeoutError:
            log.warning("episodes are released without a reward", episodes=len(self._leases))
        try:
            async with asyncio.timeout(DRAIN_SHARE * self._drain_s):
                await self._release()
        except TimeoutError:  # the broker has been told to stop too, and cannot be reached
            return False
        return True

    async def _release(self) -> None:
        await self.heartbeat.send_last()
        leases = [(held.lease.task_id, held.lease.fence) for held in self._leases]
        for start in range(0, len(leases), MAX_RELEASES):
            request = ReleaseRequest(tuple(leases[start : start + MAX_RELEASES]))
            await self._broker.release(request, deadline_s=self._give_up_s)
        for task_id, fence in leases:
            self._leases.end_lease(task_id, fence, "released")

    async def _leave(self, tools: EpisodeTools | None, *, has_failed: bool) -> None:
        """Release what is left, send BYE, and end the engine and the rewards' processes."""
        self.phase = ActorPhase.BYE
        if not self._is_broker_gone:
            with suppress(TimeoutError, NyalaError):
                async with asyncio.timeout(LEAVE_S):
                    if len(self._leases):
                        await self._release()
                    await self._broker.bye(has_failed=has_failed, deadline_s=LEAVE_S)
        for rewards in set(tools.rewards) if tools is not None else ():
            if rewards is not None:
                await rewards.close()
        await self._engine.close()

    def _follow_publication(self, publication: Publication | None) -> None:
        if publication is not None:
            self._publication = publication
            self._published.set()
            self._weights.offer(publication)
