"""Traces of episodes: ids, spans, which episodes have one, and what each role records."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from random import Random
from typing import NamedTuple, Protocol, TypeAlias

# --------------------------------------------------------------------------------------------------
# A span, and the ids that every process of a run derives alike.
#
# Nothing about a trace travels with a task: its trace is a hash of the run and the task, and the
# span of a lease one of that trace and the fence. So processes that never speak of traces make
# spans of the same one, and a lease whose actor was killed is a parent all the same.

DECIDING = 2**64
"""The lowest 64 bits of a trace id decide whether it is sampled."""

Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class SpanAddress(NamedTuple):
    """The place of a span in the traces."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span that has ended."""

    name: str
    address: SpanAddress
    parent_id: int | None
    """Span of the same trace; None = the root."""
    began_ns: int
    """Unix time."""
    ended_ns: int
    attributes: Attributes = field(default_factory=dict)
    """Attributes by their names without the prefix `nyala.`."""
    links: tuple[SpanAddress, ...] = ()
    is_error: bool = False


class TraceIds:
    """Derives the ids of traces and spans of one run.

    Args:
        run: Name of the run.
        salt: Bytes that only this run has: a later run of the same name gets other traces.
    """

    def __init__(self, run: str, salt: bytes) -> None:
        self._base = blake2b(salt + b"\0" + run.encode(), digest_size=16, person=b"nyala trace")

    def of_task(self, task_id: int) -> int:
        """Return the trace of a task, its episode's."""
        return self._derived(f"task {task_id}")

    def of_batch(self, lineage: int, step: int) -> int:
        """Return the trace of the training of a batch."""
        return self._derived(f"batch {lineage} {step}")

    def _derived(self, what: str) -> int:
        digest = self._base.copy()
        digest.update(what.encode())
        return int.from_bytes(digest.digest(), "big")


def root_of(trace_id: int) -> SpanAddress:
    """Return the root span of a trace."""
    return SpanAddress(trace_id, _span_id(trace_id, "root"))


def lease_of(trace_id: int, fence: int) -> SpanAddress:
    """Return the span of a lease in the trace of its task."""
    return SpanAddress(trace_id, _span_id(trace_id, f"lease {fence}"))


def training_of(trace_id: int, lineage: int, step: int) -> SpanAddress:
    """Return the span of an episode's training in a batch."""
    return SpanAddress(trace_id, _span_id(trace_id, f"train {lineage} {step}"))


def is_sampled(trace_id: int, share: float) -> bool:
    """Decide by the id alone, as `TraceIdRatioBased` of OpenTelemetry does.

    What a smaller share samples, a larger one samples too.
    """
    return trace_id % DECIDING < round(share * DECIDING)


def _span_id(trace_id: int, what: str) -> int:
    digest = blake2b(trace_id.to_bytes(16, "big") + what.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


# --------------------------------------------------------------------------------------------------
# The traces of this process: which episodes have one, and the spans that wait to be exported.
#
# One for a process, as its loggers are, and off until `tracing` opens it: then `trace_id_of`
# costs a comparison, and nobody makes a span. A span that finds the queue full is dropped and
# counted.

MAX_WAITING = 8192  # spans: 8 MB, and more than a process makes between two exports


class Traces:
    """Spans of the sampled episodes; any thread may put them."""

    def __init__(self) -> None:
        self._ids: TraceIds | None = None
        self._share = 0.0
        self._waiting: deque[Span] = deque()
        self._lock = threading.Lock()
        self._random = Random()
        self.dropped = 0
        """Spans that found the queue full, since it was opened."""

    @property
    def is_on(self) -> bool:
        """Whether any episode is traced."""
        return self._ids is not None

    def open(self, ids: TraceIds, *, share: float) -> None:
        """Trace this share of the episodes from now on, and forget spans that wait."""
        with self._lock:
            self._waiting.clear()
            self._ids, self._share, self.dropped = ids, share, 0
            self._random = Random()  # a forked process must not repeat what its parent drew

    def close(self) -> int:
        """Trace nothing more, drop the spans that wait, and return their number."""
        with self._lock:
            self._ids, left = None, len(self._waiting)
            self._waiting.clear()
        return left

    def trace_id_of(self, task_id: int) -> int | None:
        """Return the id of the trace of a task; None where it has none."""
        if self._ids is None:
            return None
        trace_id = self._ids.of_task(task_id)
        return trace_id if is_sampled(trace_id, self._share) else None

    def of_batch(self, lineage: int, step: int) -> int | None:
        """Return the id of the trace of a batch, which has one wherever traces are on."""
        return None if self._ids is None else self._ids.of_batch(lineage, step)

    def new_span_id(self) -> int:
        """Draw the id of a span to which no other process refers."""
        return self._random.getrandbits(64)

    def queue_span(self, span: Span) -> None:
        """Queue a span for export; if `MAX_WAITING` wait already, it is dropped and counted."""
        with self._lock:
            if self._ids is None or len(self._waiting) >= MAX_WAITING:
                self.dropped += self._ids is not None
                return
            self._waiting.append(span)

    def take_spans(self, most: int) -> list[Span]:
        """Remove and return the oldest spans that wait, at most `most`."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]


TRACES = Traces()
"""Those of this process."""


# --------------------------------------------------------------------------------------------------
# The spans of an episode, by what a process has seen of it.
#
#     task, by the learner
#     ├── lease (broker), one for each fence
#     │   ├── environment, sample, judge, reward, submit (actor): one follows the other
#     │   └── store (broker)
#     ├── expire (broker)
#     └── train, or drop (learner)
#
# A parent ends before its children do: it is what led to them. All spans of an actor are children
# of the broker's, so that the death of the actor leaves none without its parent.

MAX_LINKS = 128  # of a batch: what OpenTelemetry allows a span by default
OK = ("OK", "DUP")
"""Verdicts under which a record is in the store."""


class Leased(Protocol):
    """A record that was made under a lease."""

    @property
    def task_id(self) -> int: ...

    @property
    def fence(self) -> int: ...


class Granted(Leased, Protocol):
    """A lease as an actor gets it."""

    @property
    def length(self) -> int:
        """Tokens already in the store."""
        ...


class EpisodePhase(StrEnum):
    """Work of an actor on an episode, in its order; `judge` may lead back to `sample`."""

    ENVIRONMENT = "environment"
    """The environment makes the prompt; of a resumed episode it goes through its turns again."""
    SAMPLE = "sample"
    """The engine samples a turn."""
    JUDGE = "judge"
    """The environment, or a tool of it, answers the turn."""
    REWARD = "reward"
    """Reward functions score the episode."""
    SUBMIT = "submit"
    """The record is on its way, until the broker has acknowledged it."""
    FAIL = "fail"
    """As `submit`, of a report that the episode could not be made."""


class LeaseTrace:
    """The phases of an episode under one lease, in an actor; one ends where the next begins.

    Example:
        life = begin_lease_trace(lease.task_id, lease.fence)
        life.enter(EpisodePhase.SAMPLE, turn=0)
        life.note(tokens=17)
        life.enter(EpisodePhase.JUDGE)
        life.end_trace("lost")  # after which nothing more comes of this lease
    """

    __slots__ = ("_attributes", "_began_ns", "_lease", "_of_all", "_phase")

    def __init__(self, lease: SpanAddress | None, of_all: Attributes) -> None:
        self._lease, self._of_all = lease, of_all
        self._phase: EpisodePhase | None = None
        self._began_ns = 0
        self._attributes: dict[str, str | int | float | bool] = {}

    def enter(self, phase: EpisodePhase, **attributes: str | float) -> None:
        """End the current phase and begin another."""
        if self._lease is None:
            return
        now_ns = time.time_ns()
        self._leave(now_ns)
        self._phase, self._began_ns, self._attributes = phase, now_ns, dict(attributes)

    def note(self, **attributes: str | float) -> None:
        """Add to the attributes of the current phase."""
        if self._lease is not None:
            self._attributes.update(attributes)

    def end_trace(self, outcome: str) -> None:
        """End the current phase and this life; later calls do nothing."""
        self.note(outcome=outcome)
        self._leave(time.time_ns())
        self._lease = None

    def _leave(self, now_ns: int) -> None:
        if self._lease is None or self._phase is None:
            return
        span = Span(
            self._phase,
            SpanAddress(self._lease.trace_id, TRACES.new_span_id()),
            self._lease.span_id,
            self._began_ns,
            max(now_ns, self._began_ns),  # somebody may set the clock back
            {**self._of_all, **self._attributes},
            is_error=self._phase is EpisodePhase.FAIL,
        )
        TRACES.queue_span(span)


UNTRACED = LeaseTrace(None, {})
"""That of all episodes without a trace."""


def begin_lease_trace(task_id: int, fence: int) -> LeaseTrace:
    """Begin the life of an episode in an actor."""
    trace_id = TRACES.trace_id_of(task_id)
    if trace_id is None:
        return UNTRACED
    return LeaseTrace(lease_of(trace_id, fence), {"task": task_id, "fence": fence})


def trace_created(task_ids: Iterable[int], *, began_ns: int) -> None:
    """Trace the creation of tasks, by the learner: the root of each."""
    for task_id, trace_id in _traced(task_ids):
        _put("task", root_of(trace_id), None, began_ns, {"task": task_id})


def trace_leased(leases: Iterable[Granted], *, actor: str, began_ns: int) -> None:
    """Trace grants to an actor, by the broker."""
    by_task = {lease.task_id: lease for lease in leases} if TRACES.is_on else {}
    for task_id, trace_id in _traced(by_task):
        lease = by_task[task_id]
        attributes = {"task": task_id, "fence": lease.fence, "stored_tokens": lease.length}
        span, parent_id = lease_of(trace_id, lease.fence), root_of(trace_id).span_id
        _put("lease", span, parent_id, began_ns, {**attributes, "actor": actor})


async def tracing_stores(records: Sequence[Leased], verdicts: Awaitable[list[str]]) -> list[str]:
    """Trace the storing of records, by the broker; returns the verdicts.

    Args:
        records: The leases that they were made under.
        verdicts: The store's, in the same order.
    """
    began_ns = time.time_ns()
    outcomes = await verdicts
    if TRACES.is_on:
        for record, verdict in zip(records, outcomes, strict=True):
            if (trace_id := TRACES.trace_id_of(record.task_id)) is not None:
                attributes = {"task": record.task_id, "fence": record.fence}
                span = SpanAddress(trace_id, TRACES.new_span_id())
                _put(
                    "store",
                    span,
                    lease_of(trace_id, record.fence).span_id,
                    began_ns,
                    {**attributes, "verdict": verdict},
                    is_error=verdict not in OK,
                )
    return outcomes


def trace_expired(task_ids: Iterable[int]) -> None:
    """Trace that the broker has taken leases back whose actors were silent."""
    for task_id, trace_id in _traced(task_ids):
        _put_below_root("expire", trace_id, {"task": task_id})


def trace_dropped(groups: Iterable[int], *, group_size: int, reason: str) -> None:
    """Trace that the learner trains on no episode of these groups."""
    task_ids = (group * group_size + member for group in groups for member in range(group_size))
    for task_id, trace_id in _traced(task_ids):
        _put_below_root("drop", trace_id, {"task": task_id, "reason": reason})


def trace_batch(
    task_ids: Iterable[int], *, lineage: int, step: int, took_s: float, is_replay: bool
) -> None:
    """Trace the training of a batch, by the learner: a trace of its own, linked both ways.

    Args:
        task_ids: Ids of the batch's tasks.
        lineage: Lineage of the learner.
        step: Number of the batch.
        took_s: Seconds since the batch was claimed.
        is_replay: Whether an earlier life of the learner sealed the batch.
    """
    trace_id = TRACES.of_batch(lineage, step)
    if trace_id is None:
        return
    began_ns = time.time_ns() - int(1e9 * took_s)
    batch, of_batch = root_of(trace_id), {"lineage": lineage, "step": step, "replay": is_replay}
    trained = []
    for task_id, trace in _traced(task_ids):
        span, parent_id = training_of(trace, lineage, step), root_of(trace).span_id
        _put("train", span, parent_id, began_ns, {"task": task_id} | of_batch, links=(batch,))
        trained.append(span)
    attributes = of_batch | {"traced_episodes": len(trained)}
    _put("batch", batch, None, began_ns, attributes, links=tuple(trained[:MAX_LINKS]))


def _traced(task_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the tasks that are traced, each with its trace."""
    if TRACES.is_on:
        for task_id in task_ids:
            if (trace_id := TRACES.trace_id_of(task_id)) is not None:
                yield task_id, trace_id


def _put_below_root(name: str, trace_id: int, attributes: Attributes) -> None:
    """Queue a span without duration below the root of a trace."""
    span = SpanAddress(trace_id, TRACES.new_span_id())
    _put(name, span, root_of(trace_id).span_id, time.time_ns(), attributes)


def _put(
    name: str,
    address: SpanAddress,
    parent_id: int | None,
    began_ns: int,
    attributes: Attributes,
    *,
    links: tuple[SpanAddress, ...] = (),
    is_error: bool = False,
) -> None:
    ended_ns = max(began_ns, time.time_ns())
    TRACES.queue_span(
        Span(name, address, parent_id, began_ns, ended_ns, attributes, links, is_error)
    )
