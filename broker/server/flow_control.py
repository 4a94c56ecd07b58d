"""Flow control: bounds on requests, on replies that wait for a peer, on HELLOs and failures.

Requests: a key has a bound, over all its connections, and a holder may have no more than it leaves
to others. What is over that is refused and comes again later, while all others go on; heartbeats
have room of their own. A LEASE that waits for work does not count: it is a few hundred bytes, and
each actor has one.

Replies: ZeroMQ bounds the queue of a peer by messages, not by bytes, and a lease that continues an
episode may be as large as a message can be. ZeroMQ does not report when a reply has left the queue,
but the system cuts a peer that takes nothing for `sockets.STALLED_MS`; so a bound on what a peer is
sent within that time bounds what can wait for it.

Failures: judged beside those of other keys, because a broken environment fails everywhere and one
broken actor does not. They are counted in each broker alone: a key that spreads its failures over
several has as many budgets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from broker.transport.sockets import RECEIVE_HWM, STALLED_MS
from buffer.operations.values import holder_of
from configs.settings import BrokerSettings

MAX_REQUESTS_PER_PEER = 64  # a client keeps half of that in flight, and a copy of each may follow
MAX_REQUESTS = 4096  # of a kind: some seconds of work
WORK_FRAMES = 3  # largest messages held at once, so memory <= these two * max_message_bytes
PROMPT_FRAMES = 1  # beside them, those of heartbeats
SMALL_BYTES = 16 * 1024  # verdicts and refusals: ZeroMQ's own limit holds 64 of them to 1 MiB
WINDOW_S = STALLED_MS / 1000
HOLDER_PEERS = 8  # that may all be sent most; what a fleet is sent in a burst, spread over seconds
HELLOS = 20  # of one key at once, and again in ten seconds, beside two for each of its actors
FORGET_S = 300.0  # half of a key's failures and successes, each time
MOST_FAILURES = 20  # of a key before it is judged at all, and results of others to judge it by
FAILING_SHARE = 0.5  # of what a key's leases came to
TIMES_OTHERS = 3.0  # by which that exceeds the share of the median other
LEAST_OTHERS = 2  # with enough results, to be certain


def peer_share_bytes(settings: BrokerSettings) -> int:
    """Return how much of requests, and of large replies, one peer may have at the broker."""
    return settings.max_inflight_mb_per_actor * 2**20


def receive_hwm(settings: BrokerSettings) -> int:
    """Return how many messages ZeroMQ may hold for one peer to keep it within its share."""
    return max(2, min(RECEIVE_HWM, peer_share_bytes(settings) // settings.max_message_bytes))


def hello_buckets(actors: int) -> TokenBuckets:
    """Bound HELLOs of so many actors: they may all begin at once, and again after an outage."""
    at_once = HELLOS + 2 * actors
    return TokenBuckets(at_once=at_once, per_s=at_once / WINDOW_S, clock=time.monotonic)


@dataclass(slots=True)
class _Held:
    """Requests that the broker holds: all of one kind, of a key, or of a holder."""

    requests: int = 0
    num_bytes: int = 0

    def add(self, requests: int, num_bytes: int) -> None:
        self.requests += requests
        self.num_bytes += num_bytes


class RequestLimiter:
    """Counts requests between `admit` and the release of their slot.

    A holder may have as much as it leaves to others: alone half of the room, beside one that has
    its half a quarter, and so on. So there is always room for the next, and none has to be known
    beforehand. Work and heartbeats have rooms of their own.

    Args:
        max_message_bytes: Largest message.
        max_key_bytes: Most of one key. A single message of any size always fits.
        max_key_requests: The same in requests.
    """

    def __init__(
        self, *, max_message_bytes: int, max_key_bytes: int, max_key_requests: int
    ) -> None:
        self._rooms = {
            is_prompt: frames * max_message_bytes
            for is_prompt, frames in ((False, WORK_FRAMES), (True, PROMPT_FRAMES))
        }
        self._max_key_bytes = max_key_bytes
        self._max_key_requests = max_key_requests
        self._held: dict[bool | str | tuple[str, bool], _Held] = {}
        """By kind, by key, and by holder and kind."""

    def admit(self, num_bytes: int, tag: str, *, is_prompt: bool) -> Slot | None:
        """Count a request that was just read, before anything else may run.

        Args:
            num_bytes: Of its frame.
            tag: Of its sender's key.
            is_prompt: It is no work.

        Returns:
            Its slot; None if its key or its holder has as much as it may.
        """
        names = is_prompt, tag, (holder_of(tag), is_prompt)
        total, key, holder = (self._held.setdefault(name, _Held()) for name in names)
        is_over = (
            key.requests >= self._max_key_requests
            or key.num_bytes + num_bytes > self._max_key_bytes
        )
        left = self._rooms[is_prompt] - total.num_bytes
        leaves_little = (
            holder.requests + total.requests >= MAX_REQUESTS or holder.num_bytes + num_bytes > left
        )
        if (key.requests and is_over) or (total.requests and leaves_little):
            self._count(names, 0, 0)
            return None
        self._count(names, 1, num_bytes)
        return Slot(lambda: self._count(names, -1, -num_bytes))

    def _count(
        self, names: tuple[bool, str, tuple[str, bool]], requests: int, num_bytes: int
    ) -> None:
        for name in names:
            held = self._held[name]
            held.add(requests, num_bytes)
            if not held.requests:
                del self._held[name]


class Slot:
    """One admitted request."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Make room for another request; the second time does nothing."""
        if self._release is not None:
            self._release()
            self._release = None


class ReplyLimiter:
    """Counts bytes of large replies by connection and by holder, in windows of time.

    Args:
        max_peer_bytes: To one connection in one window. One reply of any size always fits.
        clock: Seconds.
    """

    def __init__(self, *, max_peer_bytes: int, clock: Callable[[], float]) -> None:
        self._max_peer_bytes = max_peer_bytes
        self._clock = clock
        self._ends_at = 0.0
        self._sent: dict[bytes | str, int] = {}

    def allows(self, route: bytes, holder: str, num_bytes: int) -> bool:
        """Count a reply; False if this peer, or others of its holder, have to read first."""
        if num_bytes <= SMALL_BYTES:
            return True
        now = self._clock()
        if now >= self._ends_at:
            self._ends_at = now + WINDOW_S
            self._sent.clear()
        limits: dict[bytes | str, int] = {
            route: self._max_peer_bytes,
            holder: HOLDER_PEERS * self._max_peer_bytes,
        }
        for name, most in limits.items():
            sent = self._sent.get(name, 0)
            if sent and sent + num_bytes > most:
                return False
        for name in limits:
            self._sent[name] = self._sent.get(name, 0) + num_bytes
        return True


class TokenBuckets:
    """Uses of one thing by each key or holder: some at once, and so many a second after that.

    Args:
        at_once: Of one that has used nothing for long.
        per_s: Uses that come back.
        clock: Seconds.
    """

    def __init__(self, *, at_once: float, per_s: float, clock: Callable[[], float]) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}
        """How much, and when that was."""
        self._swept_at = clock()

    def take(self, name: str) -> bool:
        """Count a use; False if this one has to wait."""
        now = self._clock()
        if now - self._swept_at > self._at_once / self._per_s:  # all that were used before are back
            self._used = {
                other: use for other, use in self._used.items() if use[1] > self._swept_at
            }
            self._swept_at = now
        used, at = self._used.get(name, (0.0, now))
        used = max(0.0, used - self._per_s * (now - at)) + 1.0
        if used > self._at_once:
            return False
        self._used[name] = used, now
        return True


def _median_high(shares: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the failures and results in the middle by their share, or the higher of two."""
    return sorted(shares, key=lambda share: share[0] / share[1])[len(shares) // 2]


def _sum(shares: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(bad for bad, _ in shares), sum(of for _, of in shares)


class Excess(NamedTuple):
    """Failures of a key that are too many."""

    text: str
    is_certain: bool
    """Others have enough results to say that it is the key's own fault, not the run's."""


class FailureBudgets:
    """Failures and successes of each key, lately.

    Nobody confirms a success: one that makes up many must not make all others look bad. So a key is
    compared with the median of the others, and its suspension is certain beside two of them.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._forgets_at = clock() + FORGET_S
        self._good: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()

    def count(self, key: str, *, good: int = 0, bad: int = 0) -> None:
        """Note how leases of a key ended."""
        if self._clock() >= self._forgets_at:
            self._forgets_at = self._clock() + FORGET_S
            for counts in (self._good, self._bad):
                for name in list(counts):
                    counts[name] //= 2
                    if not counts[name]:
                        del counts[name]
        self._good[key] += good
        self._bad[key] += bad

    def excess(self, name: str) -> Excess | None:
        """Describe failures far beyond those of others; None if they are not.

        Args:
            name: Of a key, or of a holder, which is judged without the key that fails most: that
                one is judged alone, and the holder by what it is not the cause of.
        """
        own = self._keys_of(name)
        judged = own if name in own else sorted(own, key=self._bad.__getitem__)[:-1]
        bad = sum(self._bad[key] for key in judged)
        of = bad + sum(self._good[key] for key in judged)
        if bad < MOST_FAILURES or bad < FAILING_SHARE * of:
            return None
        others = self._others(name, own)
        known = [other for other in others if other[1] >= MOST_FAILURES]
        others_bad, others_of = _median_high(known) if known else _sum(others)
        if bad * others_of < TIMES_OTHERS * others_bad * of:
            return None
        text = f"{bad} of its last {of} leases failed, of the median other's {others_bad} of"
        return Excess(f"{text} {others_of}", is_certain=len(known) >= LEAST_OTHERS)

    def forget(self, name: str) -> None:
        """Begin anew with a key, or with all of a holder."""
        for key in self._keys_of(name):
            del self._bad[key], self._good[key]

    def _others(self, name: str, own: set[str]) -> list[tuple[int, int]]:
        """Count failures and results of each other holder, and of the other keys of a key's own."""
        found: Counter[str] = Counter()
        bad: Counter[str] = Counter()
        for key in (self._bad | self._good).keys() - own:
            other = key if holder_of(key) == holder_of(name) else holder_of(key)
            found[other] += self._bad[key] + self._good[key]
            bad[other] += self._bad[key]
        return [(bad[other], of) for other, of in found.items()]

    def _keys_of(self, name: str) -> set[str]:
        return {key for key in self._bad | self._good if name in (key, holder_of(key))}
