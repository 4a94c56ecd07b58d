"""Liveness of actors: who is served, when each was last heard, how soon others have its work.

    (unknown) ──HELLO──▶ LIVE ──heartbeat_timeout_s──▶ SUSPECT ──10 times that──▶ (unknown)
                          ▲ └──BYE──▶ (unknown)        │
                          └──────any message───────────┘

Invariant: a SUSPECT actor gets no lease. It keeps its leases until the store reaps them, or until a
new actor of its key takes its place (`gone_of`).
Invariant: a session belongs to an incarnation and a key, so a peer that uses another's name speaks
only for itself. It belongs to the connection of its last HELLO; while that connection is open, no
other connection takes its place.
Soft state: a restarted broker begins with an empty table and asks for HELLO; nothing else is lost.
No I/O; the clock is injected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import asdict

from broker.protocol.messages import Figures, Hello, LeaseReply
from buffer.operations.values import TEACHER, actor_name, holder_of
from buffer.record.episode import PolicyVersion
from configs.metrics import SECONDS, Histogram

FORGET_AFTER = 10  # heartbeat timeouts: long past any lease, so that only memory is freed
MAX_TASKS = 65536  # tasks whose holders are remembered: those of a thousand actors


@dataclass(slots=True, eq=False)
class PeerSession:
    """Session of one incarnation of an actor at this broker."""

    hello: Hello
    key: str
    """Public key that the connection proved to hold."""
    tag: str
    """Tag of the key in the store."""
    route: bytes
    """Connection of its HELLO; messages on another connection are answered with `hello`."""
    seen_at: float
    """Time of its last message by the clock of the table, seconds."""
    version: PolicyVersion | None = None
    stats: Figures = field(default_factory=Figures)
    is_unreported: bool = True
    """It was heard since its figures were last written to the store."""
    granted: tuple[int, LeaseReply] | None = None
    """The last grant and the `seq` of its request, which gets the same grant when it is resent."""
    lease_seq: int = -1
    """The `seq` of the newest LEASE request; an older one that still waits gets nothing."""
    has_left: bool = False
    """It has said BYE, and has no leases."""
    is_draining: bool = False
    """It gets no more work: an operator drains it, or it is about to leave."""
    lease_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held around a grant, so that a request and its copy are not both granted."""

    def figures(self) -> dict[str, str]:
        """Return the figures that `nyala status` shows."""
        hello = self.hello
        fields = {"host": hello.host, "pid": str(hello.pid), "capacity": str(hello.capacity)}
        fields["key"] = self.tag
        if hello.teacher:
            fields[TEACHER] = hello.teacher
        if self.version is not None:
            fields["version"] = f"{self.version.lineage}.{self.version.step}"
        return fields | {name: repr(value) for name, value in asdict(self.stats).items()}


class Liveness:
    """The table of peers, by incarnation and key."""

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
        self.clock = clock
        self._peers: dict[tuple[str, str], PeerSession] = {}
        self.in_store: frozenset[str] = frozenset()
        """Actors of the run that were heard recently, where other brokers serve some of them."""
        self.has_route: Callable[[bytes], bool] = lambda _route: True
        """Returns whether a connection is open; set by the owner of the socket."""

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[PeerSession]:
        return iter(list(self._peers.values()))

    def get(self, incarnation: str, key: str) -> PeerSession | None:
        """Return the session of an incarnation under this key."""
        return self._peers.get((incarnation, key))

    def named(self, incarnation: str) -> list[PeerSession]:
        """List the sessions under this name, whatever their keys."""
        return [peer for peer in self if peer.hello.incarnation == incarnation]

    def exceeded_limit(self, incarnation: str, key: str, tag: str = "") -> str | None:
        """Return setting and value that keep this key's HELLO out; None if it can be admitted.

        An actor that comes from another broker is in the store already, so it is never one too many
        for `broker.max_actors`.
        """
        if (incarnation, key) in self._peers:
            return None
        here = {actor_name(peer.hello.incarnation, peer.tag) for peer in self._peers.values()}
        others = self.in_store - here - {actor_name(incarnation, tag)}
        if len(self._peers) + len(others) >= self._max_actors:
            return f"broker.max_actors = {self._max_actors}"
        if sum(peer.key == key for peer in self._peers.values()) >= self._max_actors_per_key:
            return f"broker.max_actors_per_key = {self._max_actors_per_key}"
        return None

    def is_alone(self, tag: str) -> bool:
        """Return whether no other actor is alive.

        Args:
            tag: Tag of a key, or of a holder; actors under it do not count.
        """
        return all(
            tag in (peer.tag, holder_of(peer.tag)) or self.is_suspect(peer)
            for peer in self._peers.values()
        )

    def gone_of(self, key: str) -> list[PeerSession]:
        """List the sessions of a key that a new actor of this key may replace.

        Their actors are silent for `heartbeat_timeout_s`, or their connections are closed.
        """
        return [peer for peer in self if peer.key == key and self._is_gone(peer)]

    def is_elsewhere(self, incarnation: str, key: str, route: bytes) -> bool:
        """Return whether another open connection of this key speaks for the incarnation."""
        peer = self.get(incarnation, key)
        return peer is not None and peer.route != route and not self._is_gone(peer)

    def admit(self, hello: Hello, key: str, tag: str, route: bytes) -> PeerSession:
        """Add the sender of a HELLO, for which `exceeded_limit` returns None.

        A repeated HELLO keeps the session, and moves it to this connection.
        """
        assert self.exceeded_limit(hello.incarnation, key, tag) is None
        peer = self.get(hello.incarnation, key)
        if peer is None:
            peer = PeerSession(hello=hello, key=key, tag=tag, route=route, seen_at=self.clock())
            self._peers[hello.incarnation, key] = peer
        peer.hello, peer.route = hello, route
        self._mark_seen(peer)
        return peer

    def observe(self, incarnation: str, key: str, route: bytes) -> PeerSession | None:
        """Note a message of a peer; None if it has not said HELLO on this connection."""
        peer = self.get(incarnation, key)
        if peer is None or peer.route != route:
            return None
        self._mark_seen(peer)
        return peer

    def is_suspect(self, peer: PeerSession) -> bool:
        """Return whether a peer gets no new lease: its session was removed, or it is silent."""
        is_present = self.get(peer.hello.incarnation, peer.key) is peer
        return not is_present or self.clock() - peer.seen_at > self._timeout_s

    def end_session(self, incarnation: str, key: str) -> None:
        """Remove a session whose actor has said BYE; `Recoveries` does not count its tasks."""
        if (peer := self.get(incarnation, key)) is not None:
            peer.has_left = True
        self.forget(incarnation, key)

    def forget(self, incarnation: str, key: str) -> None:
        """Remove a session whose actor has said nothing of its end, if there is one."""
        if (peer := self._peers.pop((incarnation, key), None)) is not None:
            peer.granted = None  # `Recoveries` may keep the peer for long

    def forget_key(self, key: str) -> list[str]:
        """Remove all incarnations of a key; return them."""
        gone = [name for name, owner in self._peers if owner == key]
        for name in gone:
            self.forget(name, key)
        return gone

    def expire(self) -> list[str]:
        """Remove peers that have been silent for very long; return their incarnations."""
        horizon = self.clock() - FORGET_AFTER * self._timeout_s
        gone = [session for session, peer in self._peers.items() if peer.seen_at < horizon]
        for session in gone:
            self.forget(*session)
        return [name for name, _ in gone]

    def _is_gone(self, peer: PeerSession) -> bool:
        return self.is_suspect(peer) or not self.has_route(peer.route)

    def _mark_seen(self, peer: PeerSession) -> None:
        peer.seen_at = self.clock()
        peer.is_unreported = True


class Move(NamedTuple):
    """A task that has gone to another actor before its former actor counted as silent."""

    former: PeerSession
    moved_at: float
    """Time of the move by the clock of the table, seconds."""


class Recoveries:
    """Times from the last sign of life of a silent actor until another actor has its work.

    They are measured for the leases that this broker granted, however these ended: at expiry, by a
    share for an actor without work, or by `nyala up`, which sees an actor of its machine die. A
    task that goes to another actor within `heartbeat_timeout_s` is counted after that time, unless
    its former actor was heard.

    Args:
        peers: The table of peers.
    """

    def __init__(self, peers: Liveness) -> None:
        self._peers = peers
        self._holders: dict[int, PeerSession] = {}
        """The last actor of each task."""
        self._expired: dict[int, float] = {}
        """Last sign of life of the actor that lost a task, until the task is leased again."""
        self._moves: deque[Move] = deque(maxlen=MAX_TASKS)
        self.requeues = Histogram(SECONDS)
        """Times until the lease expired."""
        self.recoveries = Histogram(SECONDS)
        """Times until another actor leased the task."""

    def granted(self, peer: PeerSession, tasks: Iterable[int]) -> None:
        """Count tasks that were leased to this actor."""
        now = self._peers.clock()
        for task_id in tasks:
            former = self._holders.pop(task_id, None)
            seen_at = self._expired.pop(task_id, None)
            if seen_at is not None:
                self.recoveries.observe(now - seen_at)
            elif former is not None and former is not peer and not former.has_left:
                if self._peers.is_suspect(former):
                    self.recoveries.observe(now - former.seen_at)
                else:
                    self._moves.append(Move(former, now))
            self._holders[task_id] = peer
        while len(self._holders) > MAX_TASKS:
            self._expired.pop(oldest := next(iter(self._holders)), None)
            del self._holders[oldest]

    def expired(self, tasks: Iterable[int]) -> None:
        """Count tasks whose leases were taken back."""
        for task_id in tasks:
            former = self._holders.get(task_id)
            if former is not None:
                self.requeues.observe(self._peers.clock() - former.seen_at)
                self._expired[task_id] = former.seen_at

    def judge_moves(self) -> None:
        """Count moves from actors that have been silent since; drop those of actors that spoke."""
        open_moves = deque[Move](maxlen=MAX_TASKS)
        for move in self._moves:
            if move.former.has_left or move.former.seen_at > move.moved_at:
                continue
            if self._peers.is_suspect(move.former):
                self.recoveries.observe(move.moved_at - move.former.seen_at)
            else:
                open_moves.append(move)
        self._moves = open_moves
