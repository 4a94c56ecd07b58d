"""Tokens of running requests, each with the policy version that sampled it; for all engines.

`RequestTable` belongs to the thread that makes tokens: it adds the version of the weights to each,
and decides which tokens are due. `DeltaInbox` belongs to the event loop: it drops deltas of aborted
requests and joins those of several hand-overs, so however slow its reader is, it holds at most one
delta per request. Neither has a thread or a clock.

A request is identified by its `key`, a number that is never used twice: an id may be submitted
again while tokens of its first life are still on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from buffer.record.episode import PolicyVersion, VersionSpan

from .engine import Delta, Sampled
from .turns.stop_strings import TurnWatch


@dataclass(slots=True)
class _Pending:
    request_id: str
    watch: TurnWatch | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def flush(self, finish_reason: str | None) -> Delta:
        delta = Delta(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=finish_reason,
        )
        self.token_ids.clear()
        self.logprobs.clear()
        self.versions.clear()
        return delta


class RequestTable:
    """Tokens made and not yet handed over.

    A finished request is due at once; running ones together, every `interval_s`.
    """

    def __init__(self, *, interval_s: float = 0.25) -> None:
        self._interval_s = interval_s
        self._handed_over_at = float("-inf")
        self._pending: dict[int, _Pending] = {}
        self._finished: list[tuple[int, Delta]] = []

    def __contains__(self, key: int) -> bool:
        return key in self._pending

    def begin(self, key: int, request_id: str, watch: TurnWatch | None = None) -> None:
        """Begin to collect the tokens of a request, up to where its turn ends by a string."""
        self._pending[key] = _Pending(request_id, watch)

    def forget(self, key: int) -> None:
        """Drop a request without a delta."""
        self._pending.pop(key, None)

    def refuse(self, key: int, why: str) -> None:
        """End a request that cannot be served; nothing of it was sampled."""
        pending = self._pending.pop(key)
        self._finished.append((key, Delta(pending.request_id, (), (), (), "refused", why)))

    def record(self, sampled: Sampled, version: PolicyVersion) -> bool:
        """Add tokens sampled from `version`; unknown keys (aborted meanwhile) are ignored.

        Returns:
            Whether a string ended the turn while its stepper still goes on.
        """
        key, token_ids, logprobs, finish_reason = sampled
        pending = self._pending.get(key)
        if pending is None:
            return False
        goes_on = False
        if pending.watch is not None and token_ids:
            end = pending.watch.end(token_ids)
            if end is not None:
                goes_on = finish_reason is None
                token_ids, logprobs, finish_reason = token_ids[:end], logprobs[:end], "stop"
        versions = pending.versions
        if token_ids and (not versions or versions[-1].version != version):
            versions.append(VersionSpan(version, len(pending.token_ids)))
        pending.token_ids += token_ids
        pending.logprobs += logprobs
        if finish_reason is not None:
            self._finished.append((key, pending.flush(finish_reason)))
            del self._pending[key]
        return goes_on

    def take(self, now: float) -> list[tuple[int, Delta]]:
        """Return the deltas that are due at `now` (monotonic seconds)."""
        due, self._finished = self._finished, []
        if now - self._handed_over_at >= self._interval_s:
            self._handed_over_at = now
            due += [(key, p.flush(None)) for key, p in self._pending.items() if p.token_ids]
        return due

    def keys(self) -> list[int]:
        """The keys of running requests."""
        return list(self._pending)

    def close(self) -> list[tuple[int, Delta]]:
        """Drop all requests; return the tokens that were not handed over."""
        rest = self._finished + [
            (k, p.flush(None)) for k, p in self._pending.items() if p.token_ids
        ]
        self._finished = []
        self._pending.clear()
        return rest


class DeltaInbox:
    """Deltas that wait for the reader, and the requests that it still wants."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._begun: set[int] = set()
        self._waiting: dict[int, Delta] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        """Count the requests that are wanted and have not ended."""
        return len(self._keys)

    @property
    def has_begun(self) -> bool:
        """Whether one of them has had a token."""
        return bool(self._begun)

    def expect(self, key: int, request_id: str) -> None:
        """Accept deltas of this request from now on, and no longer those of its earlier life."""
        self.drop(request_id)
        self._keys[request_id] = key

    def drop(self, request_id: str) -> int | None:
        """Stop wanting a request; return its key, or None if it is unknown or has ended."""
        key = self._keys.pop(request_id, None)
        if key is not None:
            self._waiting.pop(key, None)
            self._begun.discard(key)
        return key

    def drop_all(self) -> None:
        """Stop wanting any request."""
        self._keys.clear()
        self._begun.clear()
        self._waiting.clear()

    def put(self, deltas: list[tuple[int, Delta]]) -> None:
        """Take a hand-over."""
        for key, delta in deltas:
            if self._keys.get(delta.request_id) != key:
                continue
            self._begun.add(key)
            earlier = self._waiting.get(key)
            self._waiting[key] = delta if earlier is None else _join(earlier, delta)

    def take(self) -> list[Delta]:
        """Return all that waits, at most one delta for each request."""
        deltas = list(self._waiting.values())
        self._waiting.clear()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._begun.discard(self._keys.pop(delta.request_id))
        return deltas


def _join(first: Delta, second: Delta) -> Delta:
    offset = len(first.token_ids)
    spans = [VersionSpan(span.version, span.start + offset) for span in second.versions]
    if spans and first.versions and spans[0].version == first.versions[-1].version:
        del spans[0]
    return Delta(
        request_id=first.request_id,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=first.versions + tuple(spans),
        finish_reason=second.finish_reason,
        refusal=second.refusal,
    )
