"""Scoring of ended turns and of complete episodes, up to the record in the outbox.

Consumes episodes whose turn has ended; waits for the environment (its workers) and for the user's
reward functions (in their processes); hands episodes that need another turn back to `Sampling`
through `next_turns`. Never on the engine's path: tokens of other episodes keep coming meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

import structlog

from actors.environments.base import Score
from actors.rewards.functions import checked
from actors.rewards.pool import RewardPool
from broker.protocol.messages import MAX_REASON, Failure, FailureKind, Submission
from buffer.record.codec import encode_episode
from configs.errors import RecordError, RewardError
from configs.traces import EpisodePhase
from configs.user_code import explain

from .environment_workers import EnvironmentWorkers
from .held_leases import HeldLease, HeldLeases
from .maker import EpisodeMaker
from .outbox import Outbox
from .rollout import Judgement, State

MAX_BATCH = 64  # samples in one call of a reward function

log = structlog.get_logger()


class GroupCollector:
    """Finished episodes of groups that a reward judges as a whole, until a group is complete.

    Most groups are leased to one actor. Members of a group may be divided between actors: an actor
    has fewer places than the group has members, or has died. Such a group is scored in parts when
    it has waited long enough, or when too many episodes wait.
    """

    def __init__(self, size: int, *, wait_s: float, clock: Callable[[], float]) -> None:
        self._size, self._wait_s, self._clock = size, wait_s, clock
        self._groups: dict[int, list[HeldLease]] = {}
        """Finished episodes by group; the group that has waited longest comes first."""
        self._since: dict[int, float] = {}
        self.num_parts = 0
        """Groups that were judged in parts."""

    def add(self, held: HeldLease) -> None:
        """Take a finished episode."""
        group_id = held.lease.spec.group_id
        members = [member for member in self._groups.get(group_id, ()) if not member.has_ended]
        if not members:  # all earlier members have ended, so waiting begins anew
            self._groups.pop(group_id, None)
            self._since.pop(group_id, None)
        self._groups[group_id] = [*members, held]
        self._since.setdefault(group_id, self._clock())

    @property
    def left_s(self) -> float | None:
        """Time until the group that has waited longest is judged as it is; None = none waits."""
        oldest = next(iter(self._since.values()), None)
        return None if oldest is None else max(0.0, oldest + self._wait_s - self._clock())

    def take_groups(self, most: int) -> list[list[HeldLease]]:
        """Return the groups that are complete or have waited long enough, members in order.

        Args:
            most: Most episodes that may wait.
        """
        for group_id, members in list(self._groups.items()):
            self._groups[group_id] = [held for held in members if not held.has_ended]
        waiting = sum(map(len, self._groups.values()))
        taken = []
        for group_id, members in list(self._groups.items()):
            is_overdue = self._clock() - self._since[group_id] >= self._wait_s
            if members and len(members) < self._size and not is_overdue and waiting <= most:
                continue
            del self._groups[group_id], self._since[group_id]
            waiting -= len(members)
            if members:
                self.num_parts += len(members) < self._size
                taken.append(sorted(members, key=attrgetter("lease.task_id")))
        return taken


class Scoring:
    """Judges turns and scores episodes."""

    def __init__(
        self, environment: EnvironmentWorkers, *, leases: HeldLeases, outbox: Outbox
    ) -> None:
        self._environment = environment
        self._leases = leases
        self._outbox = outbox
        self._finished: defaultdict[int, asyncio.Queue[HeldLease]] = defaultdict(asyncio.Queue)
        """Finished episodes by environment: slow rewards of one do not delay another."""
        self._groups: defaultdict[int, asyncio.Queue[list[HeldLease]]] = defaultdict(asyncio.Queue)
        """Groups of finished episodes that a reward judges together, by environment."""
        self.next_turns: asyncio.Queue[HeldLease] = asyncio.Queue()
        """Episodes that go on with another turn."""
        self.num_finished = 0

    def put_episode(self, held: HeldLease) -> None:
        """Take an episode whose turn has ended, or that was finished when its lease came."""
        rollout = held.begun()
        if rollout.state is State.FINISHED:
            self._put_finished(held)
        else:
            held.life.enter(EpisodePhase.JUDGE, turn=rollout.num_turns)
            self._environment.submit_work(
                held, lambda _: rollout.judge(), partial(self._judged, held)
            )

    def fail(self, held: HeldLease, kind: FailureKind, reason: str) -> None:
        """Report that an episode cannot be made: close its lease, and put out the failure.

        Args:
            held: Lease of the episode.
            kind: `data` = of environment, reward or record; `infrastructure` = of the engine.
            reason: Text for people, of which the broker gets the first `MAX_REASON` characters.
        """
        lease = held.lease
        log.warning("episode failed", task_id=lease.task_id, kind=kind, reason=reason)
        held.life.enter(EpisodePhase.FAIL, kind=kind)
        self._leases.close(held)
        self._outbox.put_parcel(Failure(lease.task_id, lease.fence, kind, reason[:MAX_REASON]))

    async def score_episodes(
        self, maker: EpisodeMaker, environment: int, rewards: RewardPool | None
    ) -> None:
        """Give finished episodes their reward and put their records out, until cancelled.

        An episode without a valid reward or record is failed.

        The queue is shared by as many of these calls as the pool has workers.

        Args:
            maker: Makes the records.
            environment: Number of the environment whose episodes are scored.
            rewards: The user's functions; None = the environment's own score.
        """
        most = MAX_BATCH if rewards is None else max(1, MAX_BATCH // rewards.num_workers)
        finished, groups = self._finished[environment], self._groups[environment]
        is_grouped = rewards is not None and rewards.group_size is not None
        while True:
            batch = await (groups.get() if is_grouped else next_batch(finished, most))
            batch = [held for held in batch if not held.has_ended]
            if rewards is not None:
                await self._apply_functions(maker, rewards, batch)
            else:
                for held in batch:
                    self._submit(maker, held, _score(held))

    async def gather_groups(
        self, environment: int, size: int, *, wait_s: float, most: Callable[[], int]
    ) -> None:
        """Let finished episodes wait for the rest of their group, until cancelled.

        Answers to held-out questions belong to no group, and each is judged alone.

        Args:
            environment: Number of the environment whose episodes are gathered.
            size: Members of a group.
            wait_s: Longest time that a finished episode waits.
            most: Tells how many episodes may wait.
        """
        finished, groups = self._finished[environment], self._groups[environment]
        gathering = GroupCollector(size, wait_s=wait_s, clock=time.monotonic)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(gathering.left_s):
                    held = await finished.get()
                    if held.lease.spec.purpose == "eval":
                        groups.put_nowait([held])
                    elif not held.has_ended:
                        self._leases.wait(held)
                        gathering.add(held)
            before = gathering.num_parts
            for group in gathering.take_groups(most()):
                for held in group:
                    self._leases.resume(held)
                groups.put_nowait(group)
            if gathering.num_parts.bit_length() > before.bit_length():
                log.warning(
                    "a group is scored in parts",
                    groups=gathering.num_parts,
                    group_size=size,
                    waited_s=wait_s,
                )

    def _judged(self, held: HeldLease, judgement: Judgement | BaseException) -> None:
        """Go on with an episode whose turn its environment has judged, or fail it."""
        if held.has_ended:
            return
        if isinstance(judgement, BaseException):
            self.fail(held, "data", f"environment: {explain(judgement)}")
            return
        rollout = held.begun()
        rollout.settle(judgement)
        if rollout.state is State.SAMPLING:
            self.next_turns.put_nowait(held)
        else:
            self._put_finished(held)

    def _put_finished(self, held: HeldLease) -> None:
        held.life.enter(EpisodePhase.REWARD)
        self._finished[held.environment].put_nowait(held)

    async def _apply_functions(
        self, maker: EpisodeMaker, rewards: RewardPool, batch: Sequence[HeldLease]
    ) -> None:
        results = await rewards.score([maker.sample(held.begun()) for held in batch])
        for held, result in zip(batch, results, strict=True):
            if held.has_ended:
                continue
            if isinstance(result, RewardError):
                self.fail(held, "data", str(result))
            else:
                self._submit(maker, held, _score(held).judged(result))

    def _submit(self, maker: EpisodeMaker, held: HeldLease, score: Score) -> None:
        try:
            checked(score.reward)
            episode = maker.episode(
                held.begun(), score, started_at=held.started_at, finished_at=time.time()
            )
            record = encode_episode(episode)
        except (RewardError, RecordError) as error:
            self.fail(held, "data", str(error))
            return
        self.num_finished += 1
        held.life.enter(EpisodePhase.SUBMIT, reward=score.reward, finish=episode.finish_reason)
        self._leases.close(held)
        lease = held.lease
        submission = Submission(lease.task_id, lease.fence, record, maker.teacher(lease.spec))
        self._outbox.put_parcel(submission)


async def next_batch(queue: asyncio.Queue[HeldLease], most: int = MAX_BATCH) -> list[HeldLease]:
    """Wait for an episode, and return it with those that are in the queue by then."""
    batch = [await queue.get()]
    while len(batch) < most and not queue.empty():
        batch.append(queue.get_nowait())
    return batch


def _score(held: HeldLease) -> Score:
    score = held.begun().score
    assert score is not None
    return score
