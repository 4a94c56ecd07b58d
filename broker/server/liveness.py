"""Which incarnations the broker serves, and when each was last heard.

    (unknown) ──HELLO──▶ LIVE ──heartbeat_timeout_s──▶ SUSPECT ──10 times that──▶ (unknown)
                          ▲ └──BYE──▶ (unknown)        │
                          └──────any message───────────┘

Invariant: a SUSPECT actor gets no lease; what it holds stays its own until the store reaps it.
Soft state: a restarted broker knows nobody, asks for HELLO, and nothing else is lost. No I/O;
the clock is injected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from broker.protocol.messages import Hello, LeaseReply
from buffer.record.episode import PolicyVersion

FORGET_AFTER = 10  # heartbeat timeouts: long past any lease, so that only memory is given back


@dataclass(slots=True, eq=False)
class Peer:
    """One incarnation of an actor, as this broker has heard of it."""

    hello: Hello
    key: str
    """Public key it proved to hold; no other key may speak in its name."""
    seen_at: float
    """Clock of the table, seconds."""
    version: PolicyVersion | None = None
    stats: dict[str, float] = field(default_factory=dict)
    unreported: bool = True
    """Heard of since the store was last told."""
    granted: tuple[int, LeaseReply] | None = None
    """The last grant and the `seq` of its request: when resent, it gets this and no more."""
    lease_seq: int = -1
    """The newest LEASE request; an older one that is still parked gets nothing."""
    is_draining: bool = False
    """An operator wants it to leave: it gets no more work."""
    leasing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held around a grant, so that a request and its copy are not both granted."""


class Liveness:
    """The table of peers."""

    def __init__(
        self,
        *,
        heartbeat_timeout_s: float,
        max_actors: int,
        max_actors_per_key: int,
        clock: Callable[[], float],
    ) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._max_actors = max_actors
        self._max_actors_per_key = max_actors_per_key
        self._clock = clock
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def get(self, incarnation: str) -> Peer | None:
        """Return what is known of an incarnation."""
        return self._peers.get(incarnation)

    def lacks_room(self, incarnation: str, key: str) -> str | None:
        """Name the setting that keeps this key's HELLO out; None if it can be taken."""
        if incarnation in self._peers:
            return None
        if len(self._peers) >= self._max_actors:
            return f"broker.max_actors = {self._max_actors}"
        if sum(peer.key == key for peer in self._peers.values()) >= self._max_actors_per_key:
            return f"broker.max_actors_per_key = {self._max_actors_per_key}"
        return None

    def belongs_to(self, incarnation: str, key: str) -> bool:
        """Say whether this key may speak for this incarnation; the first to say HELLO decides."""
        peer = self._peers.get(incarnation)
        return peer is None or peer.key == key

    def admit(self, hello: Hello, key: str) -> Peer:
        """Take a HELLO; a repeated one keeps what is known of the incarnation."""
        assert self.lacks_room(hello.incarnation, key) is None
        assert self.belongs_to(hello.incarnation, key)
        peer = self._peers.get(hello.incarnation)
        if peer is None:
            peer = self._peers[hello.incarnation] = Peer(
                hello=hello, key=key, seen_at=self._clock()
            )
        peer.hello = hello
        self._touch(peer)
        return peer

    def hear(self, incarnation: str, key: str) -> Peer | None:
        """Note a message; None if HELLO has to come first, or the key is not its own."""
        peer = self._peers.get(incarnation)
        if peer is None or peer.key != key:
            return None
        self._touch(peer)
        return peer

    def is_suspect(self, peer: Peer) -> bool:
        """Say whether a peer is silent for too long, or gone, to be trusted with new leases."""
        known = self._peers.get(peer.hello.incarnation) is peer
        return not known or self._clock() - peer.seen_at > self._timeout_s

    def forget(self, incarnation: str) -> None:
        """Take a BYE."""
        self._peers.pop(incarnation, None)

    def forget_key(self, key: str) -> list[str]:
        """Forget all incarnations of a key; return them."""
        gone = [name for name, peer in self._peers.items() if peer.key == key]
        for name in gone:
            del self._peers[name]
        return gone

    def expire(self) -> list[str]:
        """Forget who has been silent for very long; return their incarnations."""
        horizon = self._clock() - FORGET_AFTER * self._timeout_s
        gone = [name for name, peer in self._peers.items() if peer.seen_at < horizon]
        for name in gone:
            del self._peers[name]
        return gone

    def _touch(self, peer: Peer) -> None:
        peer.seen_at = self._clock()
        peer.unreported = True
