"""Tasks after a fault: their next holder, the tokens kept, the attempts charged.

    followed -> lost by its holder (kept tokens are known) -> leased again or finished: settled
    followed -> longer, or finished, under the same holder: settled

Pure: `fault_case.py` and `kill_run.py` pass in snapshots of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from buffer.operations.values import TaskSeen


@dataclass(slots=True)
class TokenGrowth:
    """Growth of a task's stored tokens before the fault."""

    first_at: float
    first: int
    grew_at: float
    last: int

    def sampled_tokens(self, now: float, unsent_s: float) -> float:
        """Estimate the tokens that its holder has sampled by now, unsent for `unsent_s` at most."""
        span_s = self.grew_at - self.first_at
        rate = (self.last - self.first) / span_s if span_s > 0 else 0.0
        return self.last + rate * min(now - self.grew_at, unsent_s)


class Observer:
    """Remembers how fast tasks grow, to estimate tokens that a holder has not sent yet."""

    def __init__(self, snapshot_s: float) -> None:
        """Begin without observations.

        Args:
            snapshot_s: Pause between an actor's snapshots, after which tokens are sent.
        """
        self._snapshot_s = snapshot_s
        self._growth: dict[int, TokenGrowth] = {}

    def note(self, seen: Iterable[TaskSeen], now: float) -> None:
        """Note the stored tokens of all leased tasks."""
        kept: dict[int, TokenGrowth] = {}
        for task in seen:
            growth = self._growth.get(task.task_id) or TokenGrowth(
                now, task.length, now, task.length
            )
            if task.length > growth.last:
                growth.last, growth.grew_at = task.length, now
            kept[task.task_id] = growth
        self._growth = kept

    def sampled_tokens(self, task: TaskSeen, now: float) -> float:
        """Estimate the tokens that the holder of a task has sampled."""
        growth = self._growth.get(task.task_id)
        if growth is None:
            return float(task.length)
        return max(float(task.length), growth.sampled_tokens(now, self._snapshot_s))


@dataclass(slots=True)
class TracedTask:
    """One task since the fault."""

    before: TaskSeen
    sampled: float
    """Tokens sampled before the fault, an estimate."""
    last: TaskSeen
    is_orderly: bool = False
    """Its holder is about to leave by itself, and stores its tokens before that."""
    kept: float | None = None
    """Tokens with which its next holder began; None = never taken from its holder."""
    moved_at: float | None = None
    """Time at which another holder was first seen."""
    freed_at: float | None = None
    """Time at which its holder was first seen to have released or lost it."""
    settled: bool = False
    charged: int = 0

    def note(self, seen: TaskSeen | None, now: float) -> None:
        """Note the present state of the task; None = it has ended."""
        if seen is None:
            self.settled = True
            return
        self.charged = max(self.charged, seen.attempts - self.before.attempts)
        is_taken = seen.fence != self.before.fence or seen.state == "R"
        if is_taken and self.kept is None:
            self.kept = min(float(seen.length), self._stored_at_most)
            self.freed_at = now
        if seen.fence != self.before.fence and self.moved_at is None:
            self.moved_at = now
        is_on_its_way = seen.state == "L" and (
            seen.fence != self.before.fence or seen.length > self.before.length
        )
        self.settled = self.settled or is_on_its_way or seen.state in {"D", "X"}
        self.last = seen

    @property
    def _stored_at_most(self) -> float:
        """Tokens that its holder can have stored; more may be from the next holder."""
        return max(self.sampled, float(self.last.length)) if self.is_orderly else self.last.length


@dataclass(slots=True)
class TaskTrace:
    """The tasks that a fault affects."""

    tasks: dict[int, TracedTask] = field(default_factory=dict)

    @classmethod
    def from_tasks(
        cls, held: Iterable[TaskSeen], observer: Observer, now: float, *, is_orderly: bool = False
    ) -> TaskTrace:
        """Follow tasks from their present state on."""
        return cls(
            {t.task_id: TracedTask(t, observer.sampled_tokens(t, now), t, is_orderly) for t in held}
        )

    def note_open(self, seen: Mapping[int, TaskSeen], now: float) -> None:
        """Note the present state of tasks that are not settled; a missing one has ended."""
        for task_id in self.open_ids:
            self.tasks[task_id].note(seen.get(task_id), now)

    @property
    def open_ids(self) -> list[int]:
        """Tasks that are not settled yet."""
        return [task_id for task_id, followed in self.tasks.items() if not followed.settled]

    @property
    def any_moved(self) -> bool:
        """Whether a task was taken from its holder."""
        return any(task.kept is not None for task in self.tasks.values())

    @property
    def kept_share(self) -> float | None:
        """Share of the sampled tokens that were continued; None = there were no tokens."""
        sampled = sum(task.sampled for task in self.tasks.values())
        kept = sum(t.sampled if t.kept is None else t.kept for t in self.tasks.values())
        return min(1.0, kept / sampled) if sampled else None

    @property
    def charged(self) -> int:
        """Tasks that were charged an attempt."""
        return sum(task.charged > 0 for task in self.tasks.values())
