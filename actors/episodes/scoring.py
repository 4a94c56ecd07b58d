"""From the end of a turn to a record in the outbox.

Consumes flights whose turn has ended; waits for the environment (in the workbench) and for the
user's reward function (in its process); gives back flights that go on with another turn. Never on
the engine's path: tokens of other episodes keep coming while these are judged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from actors.environments.base import Score
from actors.rewards.functions import checked
from actors.rewards.pool import RewardPool
from broker.protocol.messages import MAX_REASON, Failure, FailureKind, Submission
from buffer.record.codec import encode_episode
from configs.errors import RecordError, RewardError

from .environment_thread import Workbench
from .flights import Flight, Flights
from .maker import EpisodeMaker
from .outbox import Outbox
from .rollout import Judgement, Rollout, State

MAX_BATCH = 64  # samples in one call of a reward function

log = structlog.get_logger()


class Finishing:
    """Judges turns and scores episodes."""

    def __init__(
        self,
        bench: Workbench,
        *,
        flights: Flights,
        outbox: Outbox,
        go_on: Callable[[list[Flight]], None],
    ) -> None:
        """Connect the parts.

        Args:
            bench: Where the environment works.
            flights: Where finished flights are removed.
            outbox: Where records and failures go.
            go_on: Called with flights that need another turn.
        """
        self._bench = bench
        self._flights = flights
        self._outbox = outbox
        self._go_on = go_on
        self._turned: asyncio.Queue[Flight] = asyncio.Queue()
        self._judged: asyncio.Queue[Flight] = asyncio.Queue()
        self.num_finished = 0

    def turned(self, flight: Flight) -> None:
        """Take a flight whose turn has ended, or that a lease brought finished."""
        assert flight.rollout is not None
        is_finished = flight.rollout.state is State.FINISHED
        (self._judged if is_finished else self._turned).put_nowait(flight)

    def fail(self, flight: Flight, kind: FailureKind, reason: str) -> None:
        """Report that an episode cannot be made."""
        lease = flight.lease
        log.warning("episode failed", task_id=lease.task_id, kind=kind, reason=reason)
        self._flights.remove(flight)
        self._outbox.put(Failure(lease.task_id, lease.fence, kind, reason[:MAX_REASON]))

    async def judge_turns(self) -> None:
        """Say ended turns to the environment, until cancelled."""
        while True:
            batch = await _batch(self._turned)
            rollouts = [_rollout(flight) for flight in batch]
            judgements = await self._bench.map(Rollout.judge, rollouts)
            going_on: list[Flight] = []
            for flight, judgement in zip(batch, judgements, strict=True):
                if flight.is_lost:
                    continue
                if isinstance(judgement, Exception):
                    reason = f"environment: {type(judgement).__name__}: {judgement}"
                    self.fail(flight, "data", reason)
                elif self._settle(flight, judgement):
                    going_on.append(flight)
            self._go_on(going_on)

    async def score_episodes(self, maker: EpisodeMaker, rewards: RewardPool | None) -> None:
        """Give finished episodes their reward and send them off, until cancelled.

        As many of these as the pool has workers share what there is.

        Args:
            maker: Makes the records.
            rewards: The user's functions; None = the environment's own score.
        """
        most = MAX_BATCH if rewards is None else max(1, MAX_BATCH // rewards.num_workers)
        while True:
            batch = [flight for flight in await _batch(self._judged, most) if not flight.is_lost]
            if rewards is not None:
                await self._apply_functions(maker, rewards, batch)
            else:
                for flight in batch:
                    self._send(maker, flight, _score(flight))

    def _settle(self, flight: Flight, judgement: Judgement) -> bool:
        """Return whether the flight needs another turn."""
        rollout = _rollout(flight)
        rollout.settle(judgement)
        if rollout.state is State.SAMPLING:
            return True
        self._judged.put_nowait(flight)
        return False

    async def _apply_functions(
        self, maker: EpisodeMaker, rewards: RewardPool, batch: Sequence[Flight]
    ) -> None:
        samples = [maker.sample(_rollout(flight)) for flight in batch]
        results = await rewards.score(samples)
        for flight, result in zip(batch, results, strict=True):
            if flight.is_lost:
                continue
            if isinstance(result, RewardError):
                self.fail(flight, "data", str(result))
            else:
                own = _score(flight)
                parts = own.parts | {"environment": own.reward} | result
                self._send(maker, flight, Score(sum(result.values()), parts, own.metrics))

    def _send(self, maker: EpisodeMaker, flight: Flight, score: Score) -> None:
        try:
            checked(score.reward)
            episode = maker.episode(
                _rollout(flight), score, started_at=flight.started_at, finished_at=time.time()
            )
            record = encode_episode(episode)
        except (RewardError, RecordError) as error:
            self.fail(flight, "data", str(error))
            return
        self.num_finished += 1
        self._flights.remove(flight)
        self._outbox.put(Submission(flight.lease.task_id, flight.lease.fence, record))


async def _batch(queue: asyncio.Queue[Flight], most: int = MAX_BATCH) -> list[Flight]:
    """Wait for one flight and take those that are there with it."""
    batch = [await queue.get()]
    while len(batch) < most and not queue.empty():
        batch.append(queue.get_nowait())
    return batch


def _rollout(flight: Flight) -> Rollout:
    assert flight.rollout is not None
    return flight.rollout


def _score(flight: Flight) -> Score:
    score = _rollout(flight).score
    assert score is not None
    return score
