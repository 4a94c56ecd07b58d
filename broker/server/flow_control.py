"""Flow control: bounds on requests, on replies that wait for a peer, on HELLOs and failures.

Requests: a key has a bound, over all its connections, and a holder may have no more than it leaves
to others. A request over that bound is refused and comes again later, while all others go on;
heartbeats have room of their own. A LEASE that waits for work does not count: it is a few hundred
bytes, and each actor has one.

Replies: ZeroMQ bounds the queue of a peer by messages, not by bytes, and a lease that continues an
episode may be as large as a message can be. ZeroMQ does not report when a reply has left the queue,
but the system cuts a peer that takes nothing for `sockets.STALLED_MS`. So a bound on the bytes sent
to a peer within that time bounds the bytes that can wait for it.

Failures: judged beside those of other keys, because a broken environment fails everywhere and one
broken actor does not. Each broker counts alone: a key that spreads its failures over several
brokers has as many budgets.
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
WORK_FRAMES = 3  # largest messages held at once: memory <= (3 + 1) * max_message_bytes
PROMPT_FRAMES = 1  # beside them, the largest of heartbeats
SMALL_BYTES = 16 * 1024  # verdicts and refusals: ZeroMQ's own limit holds 64 of them to 1 MiB
WINDOW_S = STALLED_MS / 1000
HOLDER_PEERS = 8  # peers of a holder that may all get the most; a fleet's burst takes some seconds
HELLOS = 20  # of one key at once, and again in ten seconds, beside two for each of its actors
FORGET_S = 300.0  # after each, half of a key's failures and successes are forgotten
MOST_FAILURES = 20  # of a key before it is judged, and results of another key to compare it with
FAILING_SHARE = 0.5  # of a key's leases
TIMES_OTHERS = 3.0  # factor by which its share of failures exceeds that of the median other
LEAST_OTHERS = 2  # other keys with enough results, for a certain judgement


def peer_share_bytes(settings: BrokerSettings) -> int:
    """Return the bytes of requests, and of large replies, that a peer may have at the broker."""
    return settings.max_inflight_mb_per_actor * 2**20


def receive_hwm(settings: BrokerSettings) -> int:
    """Return how many messages ZeroMQ may hold for one peer to keep it within its share."""
    return max(2, min(RECEIVE_HWM, peer_share_bytes(settings) // settings.max_message_bytes))


def hello_buckets(actors: int) -> TokenBuckets:
    """Return a limit of HELLOs by name, for names with so many actors each.

    All actors may begin at once, and again after an outage.
    """
    at_once = HELLOS + 2 * actors
    return TokenBuckets(at_once=at_once, per_s=at_once / WINDOW_S, clock=time.monotonic)


@dataclass(slots=True)
class _RequestTotals:
    """Requests that the broker has: all of one kind, of a key, or of a holder."""

    requests: int = 0
    num_bytes: int = 0

    def add(self, requests: int, num_bytes: int) -> None:
        self.requests += requests
        self.num_bytes += num_bytes


class RequestLimiter:
    """Counts requests between `admit` and the release of their slot.

    A holder may have as much as it leaves to others: half of the room if it is alone, a quarter
    beside another holder with its half, and so on. So there is always room for the next holder,
    and holders need not be known beforehand. Work and heartbeats have rooms of their own.

    Args:
        max_message_bytes: Largest message.
        max_key_bytes: Most bytes of one key. A single message of any size always fits.
        max_key_requests: Most requests of one key.
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
        self._held: dict[bool | str | tuple[str, bool], _RequestTotals] = {}
        """Requests by kind, by key, and by holder and kind."""

    def admit(self, num_bytes: int, tag: str, *, is_prompt: bool) -> RequestSlot | None:
        """Count a request that was just read, before anything else may run.

        Args:
            num_bytes: Bytes of its frame.
            tag: Tag of its sender's key.
            is_prompt: The request is no work.

        Returns:
            Slot of the request; None if its key or its holder has as much as it may.
        """
        names = is_prompt, tag, (holder_of(tag), is_prompt)
        total, key, holder = (self._held.setdefault(name, _RequestTotals()) for name in names)
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
        return RequestSlot(lambda: self._count(names, -1, -num_bytes))

    def _count(
        self, names: tuple[bool, str, tuple[str, bool]], requests: int, num_bytes: int
    ) -> None:
        for name in names:
            held = self._held[name]
            held.add(requests, num_bytes)
            if not held.requests:
                del self._held[name]


class RequestSlot:
    """The place of one admitted request."""

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
        max_peer_bytes: Most bytes to one connection in a window. A single reply always fits.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, max_peer_bytes: int, clock: Callable[[], float]) -> None:
        self._max_peer_bytes = max_peer_bytes
        self._clock = clock
        self._ends_at = 0.0
        self._sent: dict[bytes | str, int] = {}

    def allows(self, route: bytes, holder: str, num_bytes: int) -> bool:
        """Count a reply; False, without counting it, if its peer or holder has to read first.

        A reply of at most `SMALL_BYTES` is always allowed and never counted.
        """
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
    """Limits uses by each key or holder: a number at once, and a number a second after that.

    Args:
        at_once: Uses at once, after a long time without one.
        per_s: Uses that are added each second.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, at_once: float, per_s: float, clock: Callable[[], float]) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}
        """Number of uses, and the time of that number."""
        self._swept_at = clock()

    def take_token(self, name: str) -> bool:
        """Count a use; False, without counting it, if it has to wait."""
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
    """Other keys have enough results to tell a fault of this key from a fault of the run."""


class FailureBudgets:
    """Recent failures and successes of each key, half of which are forgotten every `FORGET_S`.

    A success is not verified, so a key that invents many must not make all other keys look bad.
    Therefore a key is compared with the median of the others, and two of them make a suspension
    certain.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._forgets_at = clock() + FORGET_S
        self._good: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()

    def count(self, key: str, *, good: int = 0, bad: int = 0) -> None:
        """Count leases of a key that ended well or badly."""
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

        They are if at least `MOST_FAILURES` and `FAILING_SHARE` of the recent leases failed, and
        `TIMES_OTHERS` times the share of the median other.

        Args:
            name: Name of a key, or of a holder. A holder is judged without the key that fails most,
                because that key is judged by itself.
        """
        keys = self._keys_of(name)
        judged = keys if name in keys else sorted(keys, key=self._bad.__getitem__)[:-1]
        bad = sum(self._bad[key] for key in judged)
        of = bad + sum(self._good[key] for key in judged)
        if bad < MOST_FAILURES or bad < FAILING_SHARE * of:
            return None
        others = self._others(name, keys)
        comparable = [other for other in others if other[1] >= MOST_FAILURES]
        others_bad, others_of = _median_high(comparable) if comparable else _sum(others)
        if bad * others_of < TIMES_OTHERS * others_bad * of:
            return None
        text = f"{bad} of its last {of} leases failed, but {others_bad} of {others_of} elsewhere"
        return Excess(text, is_certain=len(comparable) >= LEAST_OTHERS)

    def forget(self, name: str) -> None:
        """Forget the results of a key, or of all keys of a holder."""
        for key in self._keys_of(name):
            del self._bad[key], self._good[key]

    def _others(self, name: str, judged: set[str]) -> list[tuple[int, int]]:
        """Count failures and results of each other holder, and of other keys of the same holder."""
        results: Counter[str] = Counter()
        bad: Counter[str] = Counter()
        for key in (self._bad | self._good).keys() - judged:
            other = key if holder_of(key) == holder_of(name) else holder_of(key)
            results[other] += self._bad[key] + self._good[key]
            bad[other] += self._bad[key]
        return [(bad[other], of) for other, of in results.items()]

    def _keys_of(self, name: str) -> set[str]:
        return {key for key in self._bad | self._good if name in (key, holder_of(key))}
