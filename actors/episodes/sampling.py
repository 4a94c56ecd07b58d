"""Sampling: leased episodes into the engine, and its tokens out until a turn ends.

    lease --begin--> with the engine --pump--> turn ended --> Scoring --> outbox --deliver--> ended
                            ^                                    |
                            +------------ next turn -------------+

A lease is held in the table until its record is acknowledged, so that it is kept alive whatever its
episode waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial

import structlog
from msgspec import structs

from actors.capacity import ActorCounts, ConcurrencyLimit, WorkEstimator
from actors.engine.engine import Delta, Engine, GenerationRequest
from broker.protocol.conversation_messages import Calls
from broker.protocol.messages import Beat, Figures, Lease, Verdict
from configs.machine import UsageMeter
from configs.metrics import BusyTime
from configs.traces import EpisodePhase
from configs.user_code import explain

from .agent_mail import LISTENED, AgentMail
from .agent_rollout import AgentRollout
from .environment_workers import EnvironmentWorkers
from .held_leases import HeldLease, HeldLeases, LeaseStage
from .maker import EpisodeMaker
from .outbox import Outbox
from .rollout import ReplayMismatch, Rollout, State
from .scoring import Scoring, next_batch

log = structlog.get_logger()

WHOLE_TURN = (None, "stop", "length")
"""Finish reasons of turns that the policy ended; any other means that the engine cut the turn."""


class Sampling:
    """Moves episodes between environment, engine, `Scoring` and outbox."""

    def __init__(
        self,
        engine: Engine,
        environment: EnvironmentWorkers,
        scoring: Scoring,
        *,
        leases: HeldLeases,
        outbox: Outbox,
        mail: AgentMail,
        room: ConcurrencyLimit,
    ) -> None:
        self._mail = mail
        self._engine = engine
        self._environment = environment
        self._scoring = scoring
        self._leases = leases
        self._outbox = outbox
        self._room = room
        self._in_engine: dict[str, HeldLease] = {}
        """By request id."""
        self._is_stopped = False
        self._num_lost = 0
        self._reported_at = time.monotonic()
        self._reported_tokens = 0
        self._work, self._work_s = WorkEstimator(), 0.0
        self.num_tokens = 0
        """Sampled tokens."""
        self.busy = BusyTime()
        """Time in which the engine had episodes."""
        self._usage = UsageMeter()

    def hold(self, leases: Iterable[Lease]) -> None:
        """Keep new leases alive from now on; each takes the place of an older one of its task."""
        for lease in leases:
            older = self._leases.get(lease.task_id)
            if older is not None:
                self.lose(older)
            self._leases.hold(lease)

    def begin_episodes(self, maker: EpisodeMaker) -> None:
        """Begin or continue the episodes of all new leases."""
        granted = [held for held in self._leases if held.stage is LeaseStage.GRANTED]
        for held in granted:
            self._leases.begin_work(held, started_at=time.time())
            held.environment = maker.place(held.lease.spec).environment
            held.life.enter(EpisodePhase.ENVIRONMENT, purpose=held.lease.spec.purpose)
            work = partial(maker.begin_any, held.lease)
            self._environment.submit_work(held, work, partial(self._begun, held))

    async def pump(self) -> None:
        """Append the engine's tokens to their episodes, until cancelled.

        Raises:
            EngineError: The engine died.
        """
        has_begun = False
        while True:
            for delta in await self._engine.deltas():
                if delta.token_ids and not has_begun:
                    has_begun = True
                    newest = delta.versions[-1].version
                    log.info("first tokens", lineage=newest.lineage, step=newest.step)
                self._append(delta)

    async def begin_turns(self) -> None:
        """Give the engine the episodes that go on with another turn, until cancelled."""
        while True:
            batch = await next_batch(self._scoring.next_turns)
            self._submit([held for held in batch if not held.has_ended])

    async def hear_agents(self) -> None:
        """Begin what live agents ask for, until cancelled."""
        while True:
            for held, calls in await self._mail.listen():
                self._take_calls(held, calls)
                await asyncio.sleep(0)  # a resumption reads 50 calls in 0.2 s; heartbeats go on

    async def answer_agents(self) -> None:
        """Answer live agents, each reply together with its tokens, until cancelled."""
        while True:
            for held, kind, reason in await self._mail.say():
                if kind is None:
                    self.lose(held)
                else:
                    self._stop_requests(held)
                    self._scoring.fail(held, kind, reason)

    async def deliver(self) -> None:
        """Send records and failures until cancelled; a lease ends with its acknowledgement.

        Raises:
            DeadlineError: The broker does not answer.
        """
        while True:
            for parcel, verdict in await self._outbox.deliver():
                self._leases.end_lease(parcel.task_id, parcel.fence, verdict.verdict.value)
                if verdict.verdict in (Verdict.OUTDATED, Verdict.GONE):
                    self._num_lost += 1

    def lose(self, held: HeldLease) -> None:
        """Stop work at once on an episode whose lease another actor holds by now."""
        self._stop_requests(held)
        self._num_lost += held.stage in LISTENED
        self._leases.end_lease(held.lease.task_id, held.lease.fence, "lost")

    def give_up(self, beat: Beat, reason: str) -> None:
        """Fail an episode whose tokens the broker refuses: no actor can continue it."""
        held = self._leases.get(beat.task_id)
        if held is None or held.lease.fence != beat.fence:
            return
        if held.stage not in (*LISTENED, LeaseStage.WAITING):
            return
        self._stop_requests(held)
        self._scoring.fail(held, "data", reason)
        # Queues that still have it skip it.
        self._leases.end_lease(beat.task_id, beat.fence, "given up")

    async def stop(self) -> None:
        """Stop sampling; episodes that have all their tokens are still scored and delivered.

        Raises:
            EngineError: The engine died.
        """
        self._is_stopped = True
        self._mail.stop()
        for delta in await self._engine.halt():
            self._append(delta)
        for held in self._leases:
            is_unfinished = held.request_ids or held.rollout is None or held.agent() is not None
            if held.stage is LeaseStage.ACTIVE and is_unfinished:
                self._leave_engine(held)
                self._leases.close(held)

    def seen(self) -> ActorCounts:
        """Return the counts by which the number of concurrent episodes is tuned."""
        return ActorCounts(self.num_tokens, self._leases.num_active, self._scoring.num_finished)

    def report(self) -> Figures:
        """Return figures for `nyala status`, with the token rate since the last report."""
        now = time.monotonic()
        num_recent = self.num_tokens - self._reported_tokens
        passed_s = max(now - self._reported_at, 1e-3)
        rate = num_recent / passed_s
        self._work_s += self._work.add(
            passed_s,
            num_recent,
            episodes=len(self._in_engine),
            is_full=self._leases.num_active >= self._room.full_from,
        )
        self._reported_at, self._reported_tokens = now, self.num_tokens
        used = self._usage.read_usage()
        return structs.replace(
            self.totals(),
            tokens_per_s=rate,
            memory_bytes=float(used.memory_bytes),
            cores=used.cores,
        )

    def totals(self) -> Figures:
        """Return the same figures without the rate; from any thread."""
        return Figures(
            tokens=float(self.num_tokens),
            busy_s=self._work_s,
            in_flight=float(self._leases.num_active),
            unacked=float(len(self._outbox)),
            finished=float(self._scoring.num_finished),
            lost=float(self._num_lost),
        )

    def _begun(self, held: HeldLease, result: Rollout | AgentRollout | BaseException) -> None:
        """Go on with an episode that its environment has begun, or fail it."""
        if held.has_ended:
            return
        if isinstance(result, BaseException):
            self._scoring.fail(held, "data", explain(result))
            return
        held.start(result)
        if isinstance(result, AgentRollout):
            self._leases.want(held)
            self._mail.begin(held)
        elif result.state is State.SAMPLING:
            self._submit([held])
        else:
            self._scoring.put_episode(held)

    def _submit(self, ready: Sequence[HeldLease]) -> None:
        """Give episodes to the engine; once stopped they wait for their release instead."""
        requests = []
        for held in ready:
            if self._is_stopped:
                self._leases.close(held)
                continue
            rollout = held.begun()
            assert isinstance(rollout, Rollout)
            requests.append((held, rollout.request()))
        self._submit_requests(requests)

    def _submit_requests(self, requests: Sequence[tuple[HeldLease, GenerationRequest]]) -> None:
        for held, request in requests:
            rollout = held.begun()
            held.life.enter(EpisodePhase.SAMPLE, turn=rollout.num_turns, first_token=rollout.length)
            held.request_ids.add(request.request_id)
            self._in_engine[request.request_id] = held
        if requests:
            self._engine.submit([request for _, request in requests])
            self.busy.mark(is_busy=True)

    def _append(self, delta: Delta) -> None:
        held = self._in_engine.get(delta.request_id)
        if held is None:
            return
        if delta.finish_reason is not None:
            self._leave_engine(held, delta.request_id)
        if delta.refusal is not None:
            self._stop_requests(held)
            self._scoring.fail(held, "data", delta.refusal)
            return
        if delta.finish_reason not in WHOLE_TURN:
            reason = f"the engine broke it off: {delta.finish_reason!r}"
            self._stop_requests(held)
            self._scoring.fail(held, "infrastructure", reason)
            return
        self.num_tokens += len(delta.token_ids)
        rollout = held.begun()
        if isinstance(rollout, AgentRollout):
            self._append_turn(held, rollout, delta)
            return
        rollout.append_delta(delta)
        if delta.finish_reason is not None:
            held.life.note(end_token=rollout.length, finish=delta.finish_reason)
            self._scoring.put_episode(held)

    def _append_turn(self, held: HeldLease, rollout: AgentRollout, delta: Delta) -> None:
        """Append tokens of one of the turns that a live agent waits for."""
        if not rollout.append_delta(delta) and delta.finish_reason is None:
            self._engine.abort([delta.request_id])
            self._leave_engine(held, delta.request_id)
        self._mail.put_replies(held)

    def _take_calls(self, held: HeldLease, calls: Calls) -> None:
        """Begin the turns that a live agent asks for, or end its episode."""
        rollout = held.agent()
        if rollout is None or held.has_ended or self._is_stopped:
            return
        if calls.verdict is not Verdict.OK:
            self.lose(held)
            return
        held.ticket = calls.ticket
        try:
            requests = rollout.add_calls(calls.calls, calls.num_calls)
        except ReplayMismatch as error:
            self._scoring.fail(held, "infrastructure", str(error))
            return
        if calls.why and rollout.num_read >= calls.num_calls:
            self._end_agent(held, rollout, calls)
            return
        if held.stage in (LeaseStage.WANTED, LeaseStage.AWAY) and not rollout.is_waiting:
            self._leases.resume(held)
        elif held.stage is LeaseStage.WANTED and rollout.num_calls:
            self._leases.leave(held)  # all that was called is answered
        self._submit_requests([(held, request) for request in requests])
        self._mail.put_replies(held)

    def _end_agent(self, held: HeldLease, rollout: AgentRollout, calls: Calls) -> None:
        """Score the episode of an agent that has ended, or fail it with the reason."""
        self._stop_requests(held)
        reason = f"its agent: {calls.why}; {calls.text}"
        if calls.why == "host":  # which is not the agent's fault
            self._scoring.fail(held, "infrastructure", reason)
        elif not rollout.num_turns:
            self._scoring.fail(held, "data", f"no call was answered before the end of {reason}")
        else:
            rollout.end(calls.why, calls.text, calls.rewards)
            self._leases.resume(held)
            self._scoring.put_episode(held)

    def _stop_requests(self, held: HeldLease) -> None:
        if held.request_ids:
            self._engine.abort(sorted(held.request_ids))
        self._leave_engine(held)

    def _leave_engine(self, held: HeldLease, request_id: str | None = None) -> None:
        """Forget a request of an episode, or all of them."""
        for left in [request_id] if request_id is not None else list(held.request_ids):
            del self._in_engine[left]
            held.request_ids.remove(left)
            self.busy.mark(is_busy=bool(self._in_engine))
