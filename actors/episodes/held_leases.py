"""What the store has of every lease this actor holds, and what it must be told.

    HELD --due: tokens the store lacks, or silence--> SAID --settle--> HELD | lost

A lease is held from its grant until its record is acknowledged or it is lost. The store's own
length, which comes with every verdict, is the only one that counts: after a gap or a rewind the
tokens from there on are sent again. Pure; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from broker.protocol.messages import Beat, Lease, TaskVerdict, Verdict
from buffer.record.codec import encode_completion

from .rollout import Rollout, State

MAX_LINES = 1024  # of one heartbeat: a quarter of what the broker takes
MAX_CHUNK_BYTES = 2**20  # of one heartbeat together: no message delays another by long


@dataclass(eq=False, slots=True)
class _Held:
    lease: Lease
    stored: int
    """Tokens the store has."""
    said_at: float
    """When the store last heard of it."""
    rollout: Rollout | None = None

    @property
    def has_news(self) -> bool:
        # A restarted episode does not continue the stored chunks: they must not be mixed.
        rollout = self.rollout
        return rollout is not None and not rollout.restarted and rollout.length > self.stored


class Snapshots:
    """The leases of one actor, by task id."""

    def __init__(
        self, *, heartbeat_s: float, snapshot_s: float = 0.0, clock: Callable[[], float]
    ) -> None:
        """Begin with no lease.

        Args:
            heartbeat_s: A lease of which nothing was said for this long is due.
            snapshot_s: So is one with new tokens after this long: an episode that is shorter than
                that travels once, as its record.
            clock: Seconds.
        """
        self._heartbeat_s = heartbeat_s
        self._snapshot_s = snapshot_s
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease) -> None:
        """Keep a lease alive; a newer one of the same task takes the place of the older."""
        self._held[lease.task_id] = _Held(lease, lease.length, self._clock())

    def watch(self, rollout: Rollout) -> None:
        """Send the tokens of this episode from now on."""
        held = self._held.get(rollout.lease.task_id)
        if held is not None and held.lease.fence == rollout.lease.fence:
            held.rollout = rollout

    def let_go(self, task_id: int, fence: int) -> None:
        """Forget a lease that has ended."""
        held = self._held.get(task_id)
        if held is not None and held.lease.fence == fence:
            del self._held[task_id]

    def leases(self) -> list[tuple[int, int]]:
        """Return (task id, fence) of everything held."""
        return [(task_id, held.lease.fence) for task_id, held in self._held.items()]

    def due(self, *, final: bool = False) -> list[Beat]:
        """Return what is to be said now: new tokens, and signs of life of the silent.

        Args:
            final: Only tokens, of finished episodes too: the leases are about to be given back.
        """
        now = self._clock()
        beats: list[Beat] = []
        for task_id, held in self._held.items():
            # The record of a finished episode is on its way; its tokens need not travel twice.
            is_finished = held.rollout is not None and held.rollout.state is State.FINISHED
            silent_s = now - held.said_at
            is_due = final or (not is_finished and silent_s >= self._snapshot_s)
            if held.has_news and is_due:
                beats.append(_chunk(task_id, held))
            elif not final and silent_s >= self._heartbeat_s:
                beats.append(Beat(task_id, held.lease.fence))
        return beats

    def settle(self, beats: Iterable[Beat], verdicts: Iterable[TaskVerdict]) -> list[Lease]:
        """Take the store's verdicts, one for each beat, and return the leases that are lost."""
        now = self._clock()
        lost: list[Lease] = []
        for beat, verdict in zip(beats, verdicts, strict=True):
            held = self._held.get(beat.task_id)
            if held is None or held.lease.fence != beat.fence:
                continue
            if verdict.verdict in (Verdict.STALE, Verdict.GONE):
                lost.append(held.lease)
                del self._held[beat.task_id]
            elif verdict.verdict in (Verdict.OK, Verdict.GAP):
                held.stored, held.said_at = verdict.length, now
        return lost


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


def _chunk(task_id: int, held: _Held) -> Beat:
    assert held.rollout is not None
    completion = held.rollout.completion(held.stored)
    return Beat(
        task_id=task_id,
        fence=held.lease.fence,
        offset=held.stored,
        num_tokens=len(completion.token_ids),
        chunk=encode_completion(completion),
    )
