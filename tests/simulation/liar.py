"""An actor with a key that lies: it sends whatever the protocol lets it send, about any task.

It leases, and then beats, submits, releases and fails: under its own fences, under those next to
them, under those that it reads in the chunks of tasks that it resumes, for tasks of others and for
none, with tokens that nobody sampled, bytes that mean nothing, failures that never were, and
requests that it has sent before. The checker (`history.py`) knows what it was granted: that is all
that it may spoil.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from broker.client.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    FailRequest,
    Failure,
    Figures,
    Hello,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
    Verdicts,
)
from broker.transport.keys import KeyPair
from buffer.record.codec import decode_completion, encode_completion, encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.errors import DeadlineError, RecordError, RefusedError
from configs.hashes import run_hashes
from configs.settings import Settings
from tests.actors.support.fake_engine import ALPHABET, CharacterTokenizer
from tests.simulation.made_up import PROMPT_TOKENS

KEY = KeyPair(b"p" * 40, b"s" * 40)
PATIENCE_S = 5.0

Asked = Callable[[Any], Awaitable[Verdicts]]


class Liar:
    """One incarnation."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        endpoints: Sequence[str],
        rng: random.Random,
        *,
        on_verdict: Callable[[str, int, int, str], None],
    ) -> None:
        self._name, self._settings, self._rng, self._on_verdict = name, settings, rng, on_verdict
        self._client = BrokerClient(
            endpoints[0],
            server_key=b"b" * 40,
            keys=KEY,
            run=settings.run.name,
            incarnation=name,
            other_endpoints=endpoints[1:],
        )
        self._leases: list[Lease] = []
        self._seen: list[tuple[int, int]] = []
        """Tasks that it resumed, and fences in their chunks: those of their last holders."""
        self._version = PolicyVersion(1, 0)
        self._sent: list[tuple[Asked, Any, list[tuple[int, int]]]] = []

    async def live(self) -> None:
        """Lie until killed, or until the run has ended."""
        hello = Hello(
            self._name,
            host="simulated",
            pid=1,
            hashes=run_hashes(self._settings.run),
            capacity=self._settings.actors.max_concurrent_episodes,
        )
        lies = [self._lease, self._beat, self._beat, self._submit, self._submit]
        lies += [self._release, self._fail, self._replay, self._spoil]
        try:
            await self._client.hello(hello, deadline_s=PATIENCE_S * 10)
            while True:
                await asyncio.sleep(self._rng.uniform(0.05, 0.5))
                try:
                    await self._rng.choice(lies)()
                except (RefusedError, DeadlineError, RecordError):
                    continue
        finally:
            await self._client.close()

    async def _lease(self) -> None:
        n = self._rng.randint(1, self._settings.actors.max_concurrent_episodes)
        request = LeaseRequest(n, self._version)
        reply = await self._client.lease(request, deadline_s=PATIENCE_S)
        self._leases = [*self._leases, *reply.leases][-50:]
        self._seen = [*self._seen, *(f for lease in reply.leases for f in _fences_in(lease))][-20:]
        if reply.publication is not None:
            self._version = reply.publication.version

    async def _beat(self) -> None:
        beats = []
        for task, fence in self._targets():
            tokens = self._rng.randint(0, 6)
            chunk = self._chunk(task, fence, tokens) if tokens else b""
            beats.append(Beat(task, fence, self._rng.choice([0, 0, 3, 40]), tokens, chunk))
        stats = Figures(tokens_per_s=self._rng.choice([0.0, -1.0, 1e300]))
        await self._ask(self._client.beat, BeatRequest(tuple(beats), self._version, stats), beats)

    async def _submit(self) -> None:
        rows = [Submission(t, f, self._record(t, f)) for t, f in self._targets()]
        await self._ask(self._client.submit, SubmitRequest(tuple(rows)), rows)

    async def _release(self) -> None:
        targets = self._targets()
        await self._ask(self._client.release, ReleaseRequest(tuple(targets)), targets)

    async def _fail(self) -> None:
        rows = [
            Failure(t, f, self._rng.choice(["data", "infrastructure"]), "")
            for t, f in self._targets()
        ]
        await self._ask(self._client.fail, FailRequest(tuple(rows)), rows)

    async def _spoil(self) -> None:
        """Store tokens whose fences decrease, with which nobody can go on, and give them back."""
        if not self._leases:
            return
        lease = self._rng.choice(self._leases)
        task, fence = lease.task_id, lease.fence
        for at, of in ((lease.length, fence), (lease.length + 3, fence - 1)):
            chunk = encode_completion(self._completion(task, of, 3))
            beats = (Beat(task, fence, at, 3, chunk),)
            await self._ask(self._client.beat, BeatRequest(beats, self._version, Figures()), beats)
        await self._ask(self._client.release, ReleaseRequest(((task, fence),)), [(task, fence)])

    async def _replay(self) -> None:
        """The same once more, however old it is."""
        if self._sent:
            asked, request, targets = self._rng.choice(self._sent)
            self._hear(targets, await asked(request))

    async def _ask(self, call: Any, request: Any, rows: Sequence[Any]) -> None:
        targets = [row if isinstance(row, tuple) else (row.task_id, row.fence) for row in rows]

        async def asked(request: Any) -> Verdicts:
            verdicts: Verdicts = await call(request, deadline_s=PATIENCE_S)
            return verdicts

        self._sent = [*self._sent, (asked, request, targets)][-20:]
        self._hear(targets, await asked(request))

    def _hear(self, targets: list[tuple[int, int]], verdicts: Verdicts) -> None:
        for (task, fence), verdict in zip(targets, verdicts.verdicts, strict=True):
            self._on_verdict(self._name, task, fence, verdict.verdict.value)

    def _targets(self) -> list[tuple[int, int]]:
        """Its own leases, one in three of them under another fence or for another task; and more.

        What was leased together has one fence: it tries that of a task it resumed on those beside.
        """
        rng, found = self._rng, list[tuple[int, int]]()
        if self._seen and rng.random() < 0.5:
            task, fence = rng.choice(self._seen)
            return [(other, fence) for other in range(max(0, task - 4), task + 5) if other != task]
        for lease in rng.sample(self._leases, min(len(self._leases), rng.randint(1, 4))):
            task, fence = lease.task_id, lease.fence
            if rng.random() < 0.3:
                task = max(0, task + rng.randint(-8, 8))
                fence += rng.choice([0, 0, 1, -1, rng.randint(-(10**6), 10**6)])
            found.append((task, fence))
        return found or [(rng.randrange(50), 1_800_000_000_000_000 + rng.randrange(10**8))]

    def _completion(self, task: int, fence: int, tokens: int) -> Completion:
        ids = [self._rng.randrange(len(ALPHABET)) for _ in range(tokens)]
        return Completion(
            token_ids=np.array(ids, np.int32),
            behaviour_logprobs=np.full(tokens, -self._rng.random(), np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(VersionSpan(self._version, 0),),
            fences=(FenceRun(fence, self._rng.choice([self._name, "actor-0.2", "x" * 200]), 0),),
        )

    def _chunk(self, task: int, fence: int, tokens: int) -> bytes:
        if self._rng.random() < 0.1:
            return self._rng.randbytes(20)
        return encode_completion(self._completion(task, fence, tokens))

    def _record(self, task: int, fence: int) -> bytes:
        if self._rng.random() < 0.1:
            return self._rng.randbytes(50)
        group = task // self._settings.run.group_size
        prompt = CharacterTokenizer().encode_prompt(f"{group:0{PROMPT_TOKENS}d}")
        return encode_episode(
            Episode(
                task_id=task,
                group_id=group,
                purpose="train",
                prompt_ids=np.array(prompt, np.int32),
                completion=self._completion(task, fence, self._rng.randint(1, 60)),
                reward=self._rng.choice([0.0, 1.0, 1e9]),
                reward_parts={},
                finish_reason="stop",
                environment_metrics={},
                incarnation=self._name,
                started_at=0.0,
                finished_at=1.0,
                metadata={},
            )
        )


def _fences_in(lease: Lease) -> list[tuple[int, int]]:
    """The task with each fence under which others sampled a part of it."""
    try:
        runs = [run for chunk in lease.chunks for run in decode_completion(chunk).fences]
    except RecordError:  # of another liar
        return []
    return [(lease.task_id, run.fence) for run in runs]
