"""Scoring of ended turns and of complete episodes, up to the record in the outbox.

Consumes episodes whose turn has ended; waits for the environment (its workers) and for the user's
reward functions (in their processes); hands episodes that need another turn back to `Sampling`
through `next_turns`. Never on the engine's path: tokens of other episodes keep coming meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import structlog

from actors.environments.base import Score
from actors.rewards.functions import checked
from actors.rewards.pool import RewardPool
from broker.protocol.messages import MAX_REASON, Failure, FailureKind, Submission
from buffer.record.codec import encode_episode
from configs.errors import RecordError, RewardError
from configs.own_code import explain
from configs.traces import Phase

from .environment_workers import EnvironmentWorkers
from .held_leases import HeldLease, HeldLeases
from .maker import EpisodeMaker
from .outbox import Outbox
from .rollout import Judgement, State

MAX_BATCH = 64  # samples in one call of a reward function

log = structlog.get_logger()


class Scoring:
    """Judges turns and scores episodes."""

    def __init__(
        self, environment: EnvironmentWorkers, *, leases: HeldLeases, outbox: Outbox
    ) -> None:
        self._environment = environment
        self._leases = leases
        self._outbox = outbox
        self._finished: defaultdict[int, asyncio.Queue[HeldLease]] = defaultdict(asyncio.Queue)
        """By environment: rewards of one that take long hold up no other."""
        self.next_turns: asyncio.Queue[HeldLease] = asyncio.Queue()
        """Episodes that go on with another turn."""
        self.num_finished = 0

    def put(self, held: HeldLease) -> None:
        """Take an episode whose turn has ended, or that was finished when its lease came."""
        rollout = held.begun()
        if rollout.state is State.FINISHED:
            self._put_finished(held)
        else:
            held.life.enter(Phase.JUDGE, turn=rollout.num_turns)
            self._environment.put(held, lambda _: rollout.judge(), partial(self._judged, held))

    def fail(self, held: HeldLease, kind: FailureKind, reason: str) -> None:
        """Report that an episode cannot be made."""
        lease = held.lease
        log.warning("episode failed", task_id=lease.task_id, kind=kind, reason=reason)
        held.life.enter(Phase.FAIL, kind=kind)
        self._leases.close(held)
        self._outbox.put(Failure(lease.task_id, lease.fence, kind, reason[:MAX_REASON]))

    async def score_episodes(
        self, maker: EpisodeMaker, environment: int, rewards: RewardPool | None
    ) -> None:
        """Give finished episodes their reward and put their records out, until cancelled.

        As many of these as the pool has workers share the queue.

        Args:
            maker: Makes the records.
            environment: Whose episodes.
            rewards: The user's functions; None = the environment's own score.
        """
        most = MAX_BATCH if rewards is None else max(1, MAX_BATCH // rewards.num_workers)
        finished = self._finished[environment]
        while True:
            batch = [held for held in await next_batch(finished, most) if not held.has_ended]
            if rewards is not None:
                await self._apply_functions(maker, rewards, batch)
            else:
                for held in batch:
                    self._submit(maker, held, _score(held))

    def _judged(self, held: HeldLease, judgement: Judgement | BaseException) -> None:
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
        held.life.enter(Phase.REWARD)
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
                own = _score(held)
                parts = own.parts | {"environment": own.reward} | result
                self._submit(maker, held, Score(sum(result.values()), parts, own.metrics))

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
        held.life.enter(Phase.SUBMIT, reward=score.reward, finish=episode.finish_reason)
        self._leases.close(held)
        self._outbox.put(Submission(held.lease.task_id, held.lease.fence, record))


async def next_batch(queue: asyncio.Queue[HeldLease], most: int = MAX_BATCH) -> list[HeldLease]:
    """Wait for one episode and take those that are there with it."""
    batch = [await queue.get()]
    while len(batch) < most and not queue.empty():
        batch.append(queue.get_nowait())
    return batch


def _score(held: HeldLease) -> Score:
    score = held.begun().score
    assert score is not None
    return score
