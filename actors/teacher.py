"""A teacher: it scores finished episodes with a model that this run does not train.

    JOIN --hello--> SERVING --DONE, or stop--> DRAINING --> BYE

Consumes leases that bring records; produces the same records with `teacher_logprobs`: of each
sampled token the teacher's log-prob after the same tokens, at the temperature of the run. Its
weights never change, so a record that is scored twice, because its first teacher died, gets the
same values. Its tasks, each with one wait:

| task | waits for | unblocked by |
| --- | --- | --- |
| lease | room, then the broker's long poll | scored records; work, DONE or a stop |
| score, for each lease | `engine.probe` | the engine, within a time limit |
| deliver | the outbox | scored records, then the broker |
| beat | the clock, then the broker | never waits for the engine |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import structlog

from actors.engine.engine import Engine
from actors.episodes.interfaces import BrokerApi
from actors.episodes.outbox import Outbox
from broker.protocol.messages import (
    MAX_REASON,
    Beat,
    BeatRequest,
    Failure,
    Figures,
    Hello,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    Verdict,
)
from buffer.record.codec import decode_episode, encode_episode
from buffer.record.episode import Branch, Episode, Float32, PolicyVersion, stretches
from configs.errors import NyalaError, RecordError, SettingsError, first_error
from configs.settings import ActorSettings

from .loop import DRAIN_SHARE, GIVE_UP_S, LEAVE_S, until_event

# --------------------------------------------------------------------------------------------------
# Log-probs of an episode under a teacher.

Probe = Callable[[tuple[int, ...]], Awaitable[Sequence[float]]]
"""Returns the log-probs of tokens 1.. of a sequence."""


class LogPath(NamedTuple):
    """Tokens of a log that follow one another, up to one that nothing follows."""

    places: list[int]
    """Their places in the log."""
    is_rooted: bool
    """Whether they follow nothing, and not the prompt."""


async def score(probe: Probe, episode: Episode) -> Float32:
    """Return the log-prob of each token of a completion, 0 where the environment wrote it."""
    completion = episode.completion
    prompt, tokens = episode.prompt_ids.tolist(), completion.token_ids.tolist()
    logprobs = np.zeros(len(tokens), np.float32)
    for places, is_rooted in _whole_paths(completion.branches, len(tokens)):
        before = [] if is_rooted else prompt
        token_ids = (*before, *(tokens[place] for place in places))
        if len(token_ids) > 1:
            logprobs[places] = [0.0, *await probe(token_ids)][len(before) :]
    return np.where(completion.loss_mask == 1, logprobs, np.float32(0.0))


def _whole_paths(branches: Sequence[Branch], length: int) -> Iterator[LogPath]:
    """Cover a log by paths; those that share tokens give them the same values."""
    by_end: dict[int | None, LogPath] = {0: LogPath([], False), None: LogPath([], True)}
    followed: set[int | None] = {0, None}
    for start, end, parent in stretches(branches, length):
        before = by_end[parent]
        by_end[end] = before._replace(places=[*before.places, *range(start, end)])
        followed.add(parent)
    yield from (path for end, path in by_end.items() if end not in followed)


# --------------------------------------------------------------------------------------------------
# Loop of one teacher.

NO_VERSION = PolicyVersion(-1, -1)
"""A teacher has no version of the policy."""
RECORDS_ON_GPU, RECORDS_ON_CPU = 16, 4
"""Records at a time: some long prompts fill a step of a GPU, and one a step of a CPU."""

log = structlog.get_logger()


class Teacher:
    """One incarnation of a teacher.

    Example:
        teacher = Teacher(hello, actors=settings.actors, max_message_bytes=2**25, broker=client,
                          engine=engine)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, teacher.stop)
        await teacher.run()
    """

    def __init__(
        self,
        hello: Hello,
        *,
        actors: ActorSettings,
        max_message_bytes: int,
        broker: BrokerApi,
        engine: Engine,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        """Connect the parts; nothing runs yet.

        Args:
            hello: Identity of this incarnation; its capacity is the most records at a time.
            actors: Pauses and the time of a drain.
            max_message_bytes: Largest message to the broker.
            broker: Client of the run's broker.
            engine: Engine of the teacher's model, not started yet.
            give_up_s: Longest silence of the broker.
        """
        self._hello, self._broker, self._engine = hello, broker, engine
        self._heartbeat_s, self._drain_s = actors.heartbeat_s, actors.drain_s
        self._give_up_s = give_up_s
        self._outbox = Outbox(broker, deadline_s=give_up_s, max_message_bytes=max_message_bytes)
        self._stop, self._has_room = asyncio.Event(), asyncio.Event()
        self._held: dict[tuple[int, int], asyncio.Task[None]] = {}
        """Leases under way, by task and fence."""
        self.num_scored = self.num_lost = self.num_tokens = 0
        """Records that the store has taken, those that others have scored, and tokens read."""

    def stop(self) -> None:
        """Let `run` give its leases back and end; may be called again."""
        self._stop.set()

    async def run(self) -> None:
        """Run from JOIN to BYE; ends the engine.

        Raises:
            NyalaError: The first failure of any task; leases are released where that is possible.
        """
        has_failed = True
        try:
            async with asyncio.TaskGroup() as tasks:
                if await until_event(self._start_up(), self._stop.wait()):
                    services = [tasks.create_task(work) for work in (self._beat(), self._deliver())]
                    await until_event(self._lease(tasks), self._stop.wait())
                    await self._drain()
                    for service in services:
                        service.cancel()
            has_failed = False
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            await self._leave(has_failed=has_failed)

    async def _start_up(self) -> bool:
        log.info("starting", stage="loading the engine")
        await self._engine.start()
        log.info("starting", stage="joining the run")
        await self._broker.hello(self._hello, deadline_s=self._give_up_s)
        log.info("serving", stage="scoring", teacher=self._hello.teacher)
        return True

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        """Keep the engine busy until the run has ended."""
        while True:
            await self._outbox.until_below(2 * self._hello.capacity)
            while 2 * len(self._held) > self._hello.capacity:
                self._has_room.clear()
                await self._has_room.wait()
            free = self._hello.capacity - len(self._held)
            request = LeaseRequest(free, NO_VERSION, takes_over=False)
            reply = await self._broker.lease(request, deadline_s=self._give_up_s)
            if reply.status == "DONE":
                log.info("the run has ended")
                return
            for lease in reply.leases:
                task = tasks.create_task(self._score(lease))
                self._held[lease.task_id, lease.fence] = task
            if not reply.leases:
                await asyncio.sleep(reply.retry_after_s)

    async def _score(self, lease: Lease) -> None:
        """Score the record of a lease and put it out, or the reason why it cannot be scored."""
        try:
            episode = decode_episode(lease.chunks[0])
            logprobs = await score(self._engine.probe, episode)
            completion = replace(episode.completion, teacher_logprobs=logprobs)
            record = encode_episode(replace(episode, completion=completion))
        except (RecordError, SettingsError) as error:
            reason = f"not scored: {error}"
            log.warning("not scored", task_id=lease.task_id, reason=str(error))
            failure = Failure(lease.task_id, lease.fence, "data", reason[:MAX_REASON])
            self._outbox.put_parcel(failure)
        else:
            self.num_tokens += episode.prompt_ids.size + logprobs.size
            self._outbox.put_parcel(Submission(lease.task_id, lease.fence, record))
        self._end(lease.task_id, lease.fence)

    def _end(self, task_id: int, fence: int) -> asyncio.Task[None] | None:
        task = self._held.pop((task_id, fence), None)
        self._has_room.set()
        return task

    async def _deliver(self) -> None:
        while True:
            for parcel, verdict in await self._outbox.deliver():
                is_taken = verdict.verdict in (Verdict.OK, Verdict.DUP)
                self.num_scored += is_taken and isinstance(parcel, Submission)
                self.num_lost += not is_taken

    async def _beat(self) -> None:
        """Keep the leases, and stop work on those that others have."""
        while True:
            beats = tuple(Beat(task_id, fence) for task_id, fence in self._held)
            request = BeatRequest(beats, NO_VERSION, self._figures())
            reply = await self._broker.beat(request, deadline_s=self._give_up_s)
            for beat, verdict in zip(beats, reply.verdicts, strict=True):
                if verdict.verdict is not Verdict.OK:
                    task = self._end(beat.task_id, beat.fence)
                    self.num_lost += task is not None and task.cancel()
            await asyncio.sleep(self._heartbeat_s)

    def _figures(self) -> Figures:
        return Figures(
            tokens=float(self.num_tokens),
            in_flight=float(len(self._held)),
            unacked=float(len(self._outbox)),
            finished=float(self.num_scored),
            lost=float(self.num_lost),
        )

    async def _drain(self) -> None:
        """Deliver what is scored and give the rest back, within a share of `actors.drain_s`."""
        log.info("draining", in_flight=len(self._held), unacked=len(self._outbox))
        with suppress(TimeoutError):  # the broker has been told to stop too: leases expire
            async with asyncio.timeout(DRAIN_SHARE * self._drain_s):
                await self._release()
                await self._outbox.until_below(1)

    async def _release(self) -> None:
        leases = tuple(self._held)
        for lease in leases:
            if (task := self._end(*lease)) is not None:
                task.cancel()
        if leases:
            await self._broker.release(ReleaseRequest(leases), deadline_s=self._give_up_s)

    async def _leave(self, *, has_failed: bool) -> None:
        with suppress(TimeoutError, NyalaError):
            async with asyncio.timeout(LEAVE_S):
                await self._release()
                await self._broker.bye(has_failed=has_failed, deadline_s=LEAVE_S)
        await self._engine.close()
