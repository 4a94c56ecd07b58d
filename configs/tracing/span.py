"""A span, and the ids that every process of a run derives alike.

Nothing about a trace travels with a task: its trace is a hash of the run and the task, and the span
of a lease one of that trace and the fence. So processes that never speak of traces make spans of
the same one, and a lease whose actor was killed is a parent all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

DECIDING = 2**64
"""The lowest 64 bits of a trace id decide whether it is sampled."""

Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class SpanAddress(NamedTuple):
    """Where a span is."""

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
    """By their names without `nyala.`."""
    links: tuple[SpanAddress, ...] = ()
    is_error: bool = False


class TraceIds:
    """Ids of one run.

    Args:
        run: Its name.
        salt: What this run alone has: a later one of the same name gets other traces.
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
