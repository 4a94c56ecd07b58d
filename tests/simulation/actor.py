"""A simulated actor: the real loop, client and outbox around an engine made of a table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from actors.engine.engine import Delta, GenerationRequest, StagedWeights
from actors.engine.tokenizer import Tokenizer
from actors.environments.base import Environment
from actors.environments.calls import EnvironmentSource, drive
from actors.episodes.environment_workers import EnvironmentWorkers, Job
from actors.episodes.held_leases import HeldLease, SwapGate
from actors.episodes.maker import EpisodeMaker
from actors.loop import ActorLoop, EpisodeTools
from broker.client import BrokerClient
from broker.protocol.messages import (
    Hello,
    LeaseReply,
    LeaseRequest,
    Publication,
    SubmitRequest,
    Verdict,
    Verdicts,
)
from broker.transport.keys import KeyPair
from buffer.record.episode import PolicyVersion, VersionSpan
from configs.hashes import run_hashes
from configs.settings import Settings
from tests.simulation.made_up import PROMPT_TOKENS, expected, index_of, logprob

TOKENS_A_STEP = 10.0  # and request, on average
TRANSFER_S = 1.0
KEY = KeyPair(b"p" * 40, b"s" * 40)

Sampler = Callable[[GenerationRequest, int], tuple[int, ...]]
"""Returns at most so many of the next tokens of a request."""


def from_table(request: GenerationRequest, count: int) -> tuple[int, ...]:
    """Look the next tokens up; the request's name says whose task it is."""
    task_id = int(request.request_id.partition(".")[0])
    at = len(request.token_ids) - PROMPT_TOKENS
    tokens, _ = expected(task_id, index_of(request.token_ids[:PROMPT_TOKENS]))
    # It may go on where a liar was, beyond the table: a model ends its turn there.
    return tokens[at : at + count] or (min(request.stop_token_ids),)


class MadeUpEngine:
    """Samples what is a pure function of the request."""

    def __init__(
        self,
        rng: random.Random,
        step_s: float,
        broken_off: float,
        *,
        speeds: tuple[float, float],
        sample: Sampler,
    ) -> None:
        self._rng, self._sample = rng, sample
        self._step_s, self._broken_off = step_s, broken_off
        self._speed = rng.uniform(*speeds) * TOKENS_A_STEP
        self._running: dict[str, GenerationRequest] = {}
        self._work = asyncio.Event()
        self.version = PolicyVersion(0, 0)

    async def start(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.5, 2.0))

    def submit(self, requests: list[GenerationRequest]) -> None:
        self._running |= {request.request_id: request for request in requests}
        self._work.set()

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def halt(self) -> list[Delta]:
        """Every hand-over had all that was made."""
        self._running.clear()
        return []

    async def deltas(self) -> list[Delta]:
        while not self._running:
            self._work.clear()
            await self._work.wait()
        await asyncio.sleep(self._step_s)
        return [self._advance(request) for request in list(self._running.values())]

    async def apply(self, staged: StagedWeights) -> float:
        raise NotImplementedError("the simulated weights set the version themselves")

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        raise NotImplementedError("the simulated weights need no probe")

    async def read_back(self, staged: StagedWeights) -> list[str] | None:
        raise NotImplementedError("the simulated weights are not stored")

    async def close(self) -> None:
        self._running.clear()

    def _advance(self, request: GenerationRequest) -> Delta:
        del self._running[request.request_id]
        if self._rng.random() < self._broken_off:
            return Delta(request.request_id, (), (), (), "abort")
        some = self._sample(request, max(1, int(self._rng.uniform(0.5, 1.5) * self._speed)))
        reason = None
        for i, token in enumerate(some):
            if token in request.stop_token_ids:
                some, reason = some[: i + 1], "stop"
                break
        if reason is None:
            self._running[request.request_id] = GenerationRequest(
                request.request_id,
                request.token_ids + some,
                request.max_tokens - len(some),
                request.temperature,
                request.stop_token_ids,
            )
        spans = (VersionSpan(self.version, 0),) if some else ()
        return Delta(request.request_id, some, (logprob(self.version),) * len(some), spans, reason)


class MovingWeights:
    """Has every published version after the time of a transfer; never goes back a lineage."""

    def __init__(self, engine: MadeUpEngine, gate: SwapGate, rng: random.Random) -> None:
        self._engine, self._gate, self._rng = engine, gate, rng
        self._newest: Publication | None = None
        self._offered, self._swapped = asyncio.Event(), asyncio.Event()
        self.is_dirty = False
        self.figures: dict[str, float] = {}

    def offer(self, publication: Publication | None) -> None:
        if publication is None or publication.version <= self._engine.version:
            return
        if self._newest is None or publication.version > self._newest.version:
            self._newest = publication
            self._offered.set()

    async def first_sync(self, publication: Publication) -> PolicyVersion:
        await asyncio.sleep(TRANSFER_S * self._rng.uniform(0.5, 1.5))
        self._engine.version = max(self._engine.version, publication.version)
        return self._engine.version

    async def newer_than(self, version: PolicyVersion) -> None:
        while self._engine.version <= version:
            self._swapped.clear()
            await self._swapped.wait()

    async def run(self) -> None:
        while True:
            await self._offered.wait()
            self._offered.clear()
            assert self._newest is not None
            version = self._newest.version
            await asyncio.sleep(TRANSFER_S * self._rng.uniform(0.5, 1.5))
            await self._gate.wait()
            if version > self._engine.version:
                self._engine.version = version
                self._swapped.set()


class InlineEnvironment(EnvironmentWorkers):
    """The environment's work without its threads, which would run in real time."""

    def open(self, sources: Sequence[EnvironmentSource]) -> None:
        self._environment = sources[0].make()
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def submit_work(
        self,
        held: HeldLease,
        work: Callable[[Environment], Coroutine[Any, Any, Any]],
        done: Callable[[Any], None],
    ) -> None:
        self._jobs.put_nowait(Job(work, done))

    async def serve(self) -> None:
        while True:
            job = await self._jobs.get()
            await asyncio.sleep(0.005)
            jobs = [job, *(self._jobs.get_nowait() for _ in range(self._jobs.qsize()))]
            for job in jobs:
                job.done(_outcome(job.work(self._environment)))


class WatchedClient(BrokerClient):
    """The real client; the checker hears what the actor was granted, and what acknowledged."""

    on_ack: Callable[[int, int], None]
    on_lease: Callable[[int, int], None]

    async def lease(self, request: LeaseRequest, *, deadline_s: float = 60.0) -> LeaseReply:
        reply = await super().lease(request, deadline_s=deadline_s)
        for lease in reply.leases:
            self.on_lease(lease.task_id, lease.fence)
        return reply

    async def submit(self, request: SubmitRequest, *, deadline_s: float = 60.0) -> Verdicts:
        verdicts = await super().submit(request, deadline_s=deadline_s)
        for submission, verdict in zip(request.submissions, verdicts.verdicts, strict=True):
            if verdict.verdict in (Verdict.OK, Verdict.DUP):
                self.on_ack(submission.task_id, submission.fence)
        return verdicts


class KilledLoop(ActorLoop):
    """A process that is killed says no last words."""

    is_killed: Callable[[], bool] = staticmethod(lambda: False)

    async def _leave(self, tools: EpisodeTools | None, *, has_failed: bool) -> None:
        if not self.is_killed():
            await super()._leave(tools, has_failed=has_failed)


class Actor:
    """One incarnation; make it inside its process."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        endpoints: Sequence[str],
        rng: random.Random,
        *,
        step_s: float,
        broken_off: float,
        speeds: tuple[float, float],
        environment: Callable[[], Environment],
        tokenizer: Tokenizer,
        sample: Sampler,
        is_killed: Callable[[], bool],
        on_ack: Callable[[int, int], None],
        on_lease: Callable[[int, int], None],
    ) -> None:
        self._settings, self._name = settings, name
        self._environment, self._tokenizer = environment, tokenizer
        self.client = WatchedClient(
            endpoints[0],
            server_key=b"b" * 40,
            keys=KEY,
            run=settings.run.name,
            incarnation=name,
            other_endpoints=endpoints[1:],
        )
        self.client.on_ack, self.client.on_lease = on_ack, on_lease
        engine = MadeUpEngine(rng, step_s, broken_off, speeds=speeds, sample=sample)
        gate = SwapGate(hold_s=settings.actors.eval_hold_s)
        self.loop = KilledLoop(
            Hello(
                name,
                host="simulated",
                pid=1,
                hashes=run_hashes(settings.run),
                capacity=settings.actors.slots,
            ),
            run=settings.run,
            actors=settings.actors,
            max_message_bytes=settings.broker.max_message_bytes,
            broker=self.client,
            engine=engine,
            weights=MovingWeights(engine, gate, rng),
            gate=gate,
            prepare=self._prepare,
        )
        self.loop.is_killed = is_killed

    async def live(self) -> None:
        """Sample until the run has ended, or until asked to stop."""
        try:
            await self.loop.run()
        finally:
            await self.client.close()

    async def _prepare(self) -> EpisodeTools:
        teacher_of = self._settings.algorithm.scoring_teacher
        maker = EpisodeMaker(self._tokenizer, self._settings.run, self._name, teacher_of=teacher_of)
        return EpisodeTools(maker, [EnvironmentSource(self._environment)], [None])


def _outcome(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return drive(work)
    except Exception as error:  # noqa: BLE001 - as the real one: the caller judges
        return error
