"""A simulated teacher: the real loop, client and outbox around an engine made of a formula."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np

from actors.teacher import Teacher
from broker.protocol.messages import Hello
from buffer.record.episode import Episode
from configs.hashes import run_hashes
from configs.settings import Settings
from tests.simulation.actor import KEY, WatchedClient

RECORDS = 4  # of a teacher at a time
PROBE_S = 1.0  # at most


def logprob_of(token: int, place: int) -> float:
    """The teacher's log-prob of a token, by its place behind the beginning of the prompt."""
    return -((31 * token + place) % 97) / 97


def check_scores(episode: Episode) -> None:
    """Assert that a teacher has scored each token of an episode, with its own values (S1)."""
    completion, num_prompt = episode.completion, len(episode.prompt_ids)
    scores = completion.teacher_logprobs
    assert scores is not None, f"S1: task {episode.task_id} is trained without its score"
    right = [logprob_of(token, num_prompt + t) for t, token in enumerate(completion.token_ids)]
    wanted = np.where(completion.loss_mask == 1, right, 0.0).astype(np.float32)
    assert (scores == wanted).all(), f"S1: task {episode.task_id} has other scores"


class MadeUpProbes:
    """An engine that only answers probes, each after a while."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def start(self) -> None:
        """It is there at once."""

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        await asyncio.sleep(self._rng.uniform(0.0, PROBE_S))
        return tuple(logprob_of(token_ids[i], i) for i in range(1, len(token_ids)))

    async def close(self) -> None:
        """There is nothing to free."""


class KilledTeacher(Teacher):
    """A process that is killed says no last words."""

    is_killed: Callable[[], bool] = staticmethod(lambda: False)

    async def _leave(self, *, has_failed: bool) -> None:
        if not self.is_killed():
            await super()._leave(has_failed=has_failed)


class SimulatedTeacher:
    """One incarnation; make it inside its process."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        endpoints: Sequence[str],
        rng: random.Random,
        *,
        is_killed: Callable[[], bool],
        on_ack: Callable[[int, int], None],
        on_lease: Callable[[int, int], None],
    ) -> None:
        self._client = WatchedClient(
            endpoints[0],
            server_key=b"b" * 40,
            keys=KEY,
            run=settings.run.name,
            incarnation=name,
            other_endpoints=endpoints[1:],
        )
        self._client.on_ack, self._client.on_lease = on_ack, on_lease
        hashes = run_hashes(settings.run)
        self._loop = KilledTeacher(
            Hello(name, "simulated", pid=1, hashes=hashes, capacity=RECORDS, teacher="teacher"),
            actors=settings.actors,
            max_message_bytes=settings.broker.max_message_bytes,
            broker=self._client,
            engine=MadeUpProbes(rng),  # type: ignore[arg-type]  # a teacher needs no more
        )
        self._loop.is_killed = is_killed

    async def live(self) -> None:
        """Score until the run has ended."""
        try:
            await self._loop.run()
        finally:
            await self._client.close()
