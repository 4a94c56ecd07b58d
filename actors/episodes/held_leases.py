"""Leases of one actor, from grant to acknowledged record, and the gate that holds swaps back.

    GRANTED --begin--> ACTIVE --close--> CLOSED --end--> ENDED
       |                ^  |                               ^
       |          resume|  |wait, leave                    |
       |        WAITING, WANTED, AWAY                      |
       +-------------------+----- released, or lost -------+

Heartbeats keep a lease alive in each stage but the last, and bring the store the tokens that
it lacks. The store's own length, which comes with every verdict, is the only one that counts: after
a gap or a rewind the tokens from there on are sent again. An episode that was begun again, because
its stored tokens could not be continued, is sent whole each time: it replaces them, and cannot be
mixed with them, whatever the store has lost. The longer it is, the less often.

Invariant: a lease is in the table exactly until it has ended. No I/O; the clock is injected.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from broker.protocol.messages import Beat, Lease, TaskVerdict, Verdict
from buffer.record.codec import encode_completion
from configs.traces import UNTRACED, LeaseTrace, begin_lease_trace

from .agent_rollout import AgentRollout
from .rollout import Rollout, State

# --------------------------------------------------------------------------------------------------
# Gate that holds new weights back while evaluations run.
#
# An evaluation is to be made by one policy. While the actor works on one, a swap waits, but never
# longer than `actors.eval_hold_s`: then the version spans of the evaluation show the change.

log = structlog.get_logger()


class SwapGate:
    """A gate for new weights, open while no evaluation runs."""

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._running: set[int] = set()
        self._open = asyncio.Event()
        self._open.set()

    def begin_evaluation(self, task_id: int) -> None:
        """Close the gate for an evaluation episode."""
        self._running.add(task_id)
        self._open.clear()

    def end_evaluation(self, task_id: int) -> None:
        """Open the gate if this was the last one. Idempotent; ids of other episodes are ignored."""
        self._running.discard(task_id)
        if not self._running:
            self._open.set()

    async def wait(self) -> None:
        """Wait until the gate is open, at most for `hold_s`; it may still be closed then."""
        try:
            async with asyncio.timeout(self._hold_s):
                await self._open.wait()
        except TimeoutError:
            log.warning("weights change during an evaluation", episodes=len(self._running))


# --------------------------------------------------------------------------------------------------
# Leases of one actor, from the grant to the acknowledgement of the record.

MAX_LINES = 1024  # of one heartbeat: a quarter of what the broker takes
MAX_CHUNK_BYTES = 2**20  # of one heartbeat together: no message delays another by long
WHOLE_TOKENS_PER_S = 4096  # of an episode that is sent whole each time: 36 KB in each second
LONGEST_PAUSE_S = 30.0  # between two of its snapshots: a quarter of the default limit of a lease


class LeaseStage(StrEnum):
    """Progress of the work on a lease."""

    GRANTED = "granted"
    ACTIVE = "active"
    """The environment, the engine or a reward function has its episode."""
    WAITING = "waiting"
    """Its episode is finished and waits for others of its group; it holds no place."""
    WANTED = "wanted"
    """No live agent has called yet, and maybe no host has taken it; it holds no place."""
    AWAY = "away"
    """Its live agent works between two calls; it holds no place."""
    CLOSED = "closed"
    """Its record or failure is in the outbox, or it waits for its release."""
    ENDED = "ended"
    """Acknowledged, released, or owned by another fence: work in hand is dropped."""


@dataclass(eq=False, slots=True)
class HeldLease:
    """One lease and the episode that is made under it."""

    lease: Lease
    num_stored: int
    """Tokens that the store has."""
    confirmed_at: float
    """Time of the grant or of the store's last verdict, seconds of the clock."""
    stored_at: float
    """Time of the grant or of the last verdict on tokens. Signs of life do not count: where they
    are more frequent than snapshots, no snapshot would ever be due."""
    stage: LeaseStage = LeaseStage.GRANTED
    started_at: float = 0.0
    """Begin of the work, Unix seconds."""
    rollout: Rollout | AgentRollout | None = None
    """None until the environment has begun the episode."""
    request_ids: set[str] = field(default_factory=set)
    """Requests that the engine has: one at most, but of a live agent any number."""
    ticket: int = 0
    """Number under which a host has the episode's live agent; 0 = none is known."""
    environment: int = 0
    """Number of its environment among those of the run."""
    place: object | None = None
    """Where its environment is called (`environment_workers.py`)."""
    life: LeaseTrace = UNTRACED
    """The trace of its episode."""

    @property
    def has_ended(self) -> bool:
        """Whether this actor no longer holds the lease."""
        return self.stage is LeaseStage.ENDED

    def begun(self) -> Rollout | AgentRollout:
        """Return the rollout of an episode that the environment has begun."""
        assert self.rollout is not None
        return self.rollout

    def has_news(self) -> bool:
        """Whether there are tokens that the store lacks."""
        return self.rollout is not None and self.rollout.length > self.num_stored

    def least_pause_s(self) -> float:
        """Shortest pause between two snapshots that costs little, however long the episode is."""
        if self.rollout is None or not self.rollout.restarted:
            return 0.0  # what is new is sent alone
        return min(LONGEST_PAUSE_S, self.rollout.length / WHOLE_TOKENS_PER_S)

    def agent(self) -> AgentRollout | None:
        """Return the episode if a live agent makes its turns, and may call again."""
        rollout = self.rollout
        if isinstance(rollout, AgentRollout) and rollout.state is State.SAMPLING:
            return rollout
        return None

    def start(self, rollout: Rollout | AgentRollout) -> None:
        """Take the episode that the environment has begun."""
        self.rollout = rollout
        if rollout.restarted:
            self.num_stored = 0

    def note_stored(self, beat: Beat, length: int) -> None:
        """Note how many tokens the store has, `length` by its own count.

        For a restarted episode the store may count tokens of the earlier try as well, so no more
        count than this beat has brought.
        """
        if self.rollout is None or not self.rollout.restarted:
            self.num_stored = length
        elif beat.num_tokens:
            self.num_stored = min(beat.num_tokens, length)


class HeldLeases:
    """The table of leases, by task; active ones of an evaluation keep the swap gate closed."""

    def __init__(
        self,
        gate: SwapGate,
        *,
        heartbeat_s: float,
        snapshot_s: float = 0.0,
        clock: Callable[[], float],
    ) -> None:
        """Begin with no lease.

        Args:
            gate: Closed while an evaluation is active.
            heartbeat_s: A lease without a verdict for this long is due.
            snapshot_s: A lease with new tokens is due after this long. A shorter episode travels
                once, as its record.
            clock: Returns the time in seconds.
        """
        self._gate = gate
        self._heartbeat_s = heartbeat_s
        self._snapshot_s = snapshot_s
        self._clock = clock
        self._by_task: dict[int, HeldLease] = {}
        self._changed = asyncio.Event()
        self.num_active = self.num_away = self.num_wanted = 0

    def __len__(self) -> int:
        return len(self._by_task)

    def __iter__(self) -> Iterator[HeldLease]:
        return iter(list(self._by_task.values()))

    def get(self, task_id: int) -> HeldLease | None:
        """Return the lease of a task, or None if this actor holds none."""
        return self._by_task.get(task_id)

    def hold(self, lease: Lease) -> HeldLease:
        """Keep a new lease alive; an older one of the same task must have ended."""
        assert lease.task_id not in self._by_task
        now, life = self._clock(), begin_lease_trace(lease.task_id, lease.fence)
        held = HeldLease(lease, lease.length, confirmed_at=now, stored_at=now, life=life)
        self._by_task[lease.task_id] = held
        return held

    def begin_work(self, held: HeldLease, *, started_at: float) -> None:
        """Begin the work on a lease."""
        assert held.stage is LeaseStage.GRANTED
        held.started_at = started_at
        if held.lease.spec.purpose == "eval":
            self._gate.begin_evaluation(held.lease.task_id)
        self._enter(held, LeaseStage.ACTIVE)

    def wait(self, held: HeldLease) -> None:
        """Give the place of a finished episode to another while its group is made."""
        self._enter(held, LeaseStage.WAITING)

    def want(self, held: HeldLease) -> None:
        """Have an episode wait for the first call of its live agent, without a place."""
        self._enter(held, LeaseStage.WANTED)

    def leave(self, held: HeldLease) -> None:
        """Give the place of an episode to another while its live agent works."""
        self._enter(held, LeaseStage.AWAY)

    def resume(self, held: HeldLease) -> None:
        """Go on with an episode that has waited, or whose live agent was away."""
        self._enter(held, LeaseStage.ACTIVE)

    def close(self, held: HeldLease) -> None:
        """Note that nothing more is made under a lease."""
        self._enter(held, LeaseStage.CLOSED)

    def end_lease(self, task_id: int, fence: int, outcome: str) -> None:
        """Take a lease out of the table; no-op where another fence of the task is held.

        Args:
            task_id: Task of the lease.
            fence: Fence under which the lease was granted.
            outcome: Reason for the end, for the episode's trace.
        """
        held = self._by_task.get(task_id)
        if held is not None and held.lease.fence == fence:
            held.life.end_trace(outcome)
            del self._by_task[task_id]
            self._enter(held, LeaseStage.ENDED)

    @property
    def num_with_agents(self) -> int:
        """Leases that wait for their live agents."""
        return self.num_wanted + self.num_away

    async def until_active_below(self, limit: int, *, away: float = math.inf) -> None:
        """Wait until fewer leases than this are active, and fewer than `away` are away."""
        while self.num_active >= limit or self.num_away >= away:
            self._changed.clear()
            await self._changed.wait()

    async def until_with_agents_below(self, limit: int) -> None:
        """Wait until fewer leases than this wait for their live agents."""
        while self.num_with_agents >= limit:
            self._changed.clear()
            await self._changed.wait()

    def due(self, *, final: bool = False) -> list[Beat]:
        """Return the beats that are due: new tokens, and signs of life of leases without any.

        Args:
            final: Return only tokens, and those of finished episodes too: the leases are about to
                be released.
        """
        now = self._clock()
        beats: list[Beat] = []
        for task_id, held in self._by_task.items():
            # The record of a finished episode is on its way; its tokens need not travel twice.
            is_finished = (
                held.rollout is not None
                and held.rollout.state is State.FINISHED
                and held.stage is not LeaseStage.WAITING
            )
            pause_s = max(self._snapshot_s, held.least_pause_s())
            is_due = final or (not is_finished and now - held.stored_at >= pause_s)
            if is_due and held.has_news():
                beats.append(next_chunk(held))
            elif not final and now - held.confirmed_at >= self._heartbeat_s:
                beats.append(Beat(task_id, held.lease.fence))
        return beats

    def apply_verdicts(
        self, beats: Iterable[Beat], verdicts: Iterable[TaskVerdict]
    ) -> list[HeldLease]:
        """Apply the store's verdicts, one for each beat.

        Returns:
            Leases that another actor holds by now; the caller ends them.
        """
        lost: list[HeldLease] = []
        for beat, verdict in zip(beats, verdicts, strict=True):
            held = self._by_task.get(beat.task_id)
            if held is None or held.lease.fence != beat.fence:
                continue
            if verdict.verdict in (Verdict.OUTDATED, Verdict.GONE):
                lost.append(held)
            elif verdict.verdict in (Verdict.OK, Verdict.GAP):
                self.note_verdict(held, beat, verdict.length)
        return lost

    def note_verdict(self, held: HeldLease, beat: Beat, length: int) -> None:
        """Note what the store has of a lease, and that it is this actor's."""
        held.note_stored(beat, length)
        held.confirmed_at = self._clock()
        if beat.num_tokens:
            held.stored_at = held.confirmed_at

    def _enter(self, held: HeldLease, stage: LeaseStage) -> None:
        self.num_active += (stage is LeaseStage.ACTIVE) - (held.stage is LeaseStage.ACTIVE)
        self.num_away += (stage is LeaseStage.AWAY) - (held.stage is LeaseStage.AWAY)
        self.num_wanted += (stage is LeaseStage.WANTED) - (held.stage is LeaseStage.WANTED)
        held.stage = stage
        if stage is not LeaseStage.ACTIVE:
            self._gate.end_evaluation(held.lease.task_id)
        self._changed.set()


def portions(beats: Sequence[Beat]) -> Iterator[tuple[Beat, ...]]:
    """Cut beats into messages of bounded size."""
    portion: list[Beat] = []
    size = 0
    for beat in beats:
        if portion and (len(portion) >= MAX_LINES or size + len(beat.chunk) > MAX_CHUNK_BYTES):
            yield tuple(portion)
            portion, size = [], 0
        portion.append(beat)
        size += len(beat.chunk)
    if portion:
        yield tuple(portion)


def next_chunk(held: HeldLease) -> Beat:
    """Return the tokens that the store lacks; a sign of life if it has all."""
    offset = 0 if held.begun().restarted else held.num_stored
    if offset == held.begun().length:
        return Beat(held.lease.task_id, held.lease.fence, offset)
    completion = held.begun().completion(offset)
    return Beat(
        task_id=held.lease.task_id,
        fence=held.lease.fence,
        offset=offset,
        num_tokens=len(completion.token_ids),
        chunk=encode_completion(completion),
    )
