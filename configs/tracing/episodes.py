"""The spans of an episode, by what a process has seen of it.

    task (learner)
    ├── lease (broker), one for each fence
    │   ├── environment, sample, judge, reward, submit (actor): one follows the other
    │   └── store (broker)
    ├── expire (broker)
    └── train, or drop (learner)

A parent ends before its children do: it is what led to them. All spans of an actor are children of
the broker's, so that the death of the actor leaves none without its parent.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

from .span import Attributes, Span, SpanAddress, lease_of, root_of, training_of
from .traces import TRACES

MAX_LINKS = 128  # of a batch: what OpenTelemetry allows a span by default
OK = ("OK", "DUP")
"""Verdicts under which a record is in the store."""


class Leased(Protocol):
    """Anything that was made under a lease."""

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


class Phase(StrEnum):
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


class Life:
    """The phases of an episode under one lease, in an actor; one ends where the next begins.

    Example:
        life = trace_life(lease.task_id, lease.fence)
        life.enter(Phase.SAMPLE, turn=0)
        life.note(tokens=17)
        life.enter(Phase.JUDGE)
        life.end("lost")  # after which nothing more comes of this lease
    """

    __slots__ = ("_attributes", "_began_ns", "_lease", "_of_all", "_phase")

    def __init__(self, lease: SpanAddress | None, of_all: Attributes) -> None:
        self._lease, self._of_all = lease, of_all
        self._phase: Phase | None = None
        self._began_ns = 0
        self._attributes: dict[str, str | int | float | bool] = {}

    def enter(self, phase: Phase, **attributes: str | float) -> None:
        """End the phase at hand and begin another."""
        if self._lease is None:
            return
        now_ns = time.time_ns()
        self._leave(now_ns)
        self._phase, self._began_ns, self._attributes = phase, now_ns, dict(attributes)

    def note(self, **attributes: str | float) -> None:
        """Add to the attributes of the phase at hand."""
        if self._lease is not None:
            self._attributes.update(attributes)

    def end(self, outcome: str) -> None:
        """End the phase at hand and this life; later calls do nothing."""
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
            is_error=self._phase is Phase.FAIL,
        )
        TRACES.put(span)


UNTRACED = Life(None, {})
"""That of all episodes without a trace."""


def trace_life(task_id: int, fence: int) -> Life:
    """Begin the life of an episode in an actor."""
    trace_id = TRACES.of(task_id)
    if trace_id is None:
        return UNTRACED
    return Life(lease_of(trace_id, fence), {"task": task_id, "fence": fence})


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
    found = await verdicts
    if TRACES.is_on:
        for each, verdict in zip(records, found, strict=True):
            if (trace_id := TRACES.of(each.task_id)) is not None:
                attributes = {"task": each.task_id, "fence": each.fence}
                span = SpanAddress(trace_id, TRACES.new_span_id())
                _put(
                    "store",
                    span,
                    lease_of(trace_id, each.fence).span_id,
                    began_ns,
                    {**attributes, "verdict": verdict},
                    is_error=verdict not in OK,
                )
    return found


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
        task_ids: Of its episodes.
        lineage: The learner's.
        step: Of the batch.
        took_s: Since the batch was claimed.
        is_replay: An earlier life of the learner has sealed it.
    """
    trace_id = TRACES.of_batch(lineage, step)
    if trace_id is None:
        return
    began_ns = time.time_ns() - int(1e9 * took_s)
    batch, of_batch = root_of(trace_id), {"lineage": lineage, "step": step, "replay": is_replay}
    trained = []
    for task_id, each in _traced(task_ids):
        span, parent_id = training_of(each, lineage, step), root_of(each).span_id
        _put("train", span, parent_id, began_ns, {"task": task_id} | of_batch, links=(batch,))
        trained.append(span)
    attributes = of_batch | {"traced_episodes": len(trained)}
    _put("batch", batch, None, began_ns, attributes, links=tuple(trained[:MAX_LINKS]))


def _traced(task_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the tasks that are traced, each with its trace."""
    if TRACES.is_on:
        for task_id in task_ids:
            if (trace_id := TRACES.of(task_id)) is not None:
                yield task_id, trace_id


def _put_below_root(name: str, trace_id: int, attributes: Attributes) -> None:
    """Put what has no duration."""
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
    TRACES.put(Span(name, address, parent_id, began_ns, ended_ns, attributes, links, is_error))
