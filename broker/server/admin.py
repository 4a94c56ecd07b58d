"""Requests that are no actor's: status of the run, revocation and enrolment of keys, drains.

Has no socket, like the service. A revocation or an enrolment changes the keys folder of this
broker; brokers with a folder of their own need a request each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.protocol.codec import Envelope
from broker.protocol.messages import (
    DrainRequest,
    Enrol,
    Receipt,
    Refusal,
    RevokeRequest,
    StatusReply,
    StatusRequest,
)
from broker.transport.allow_list import Member, revoke
from broker.transport.enrolled import EnrolledKeys
from buffer import operations
from buffer.store import AsyncStore
from configs.errors import SettingsError, StoreError

from .audit import Audit
from .flow_control import TokenBuckets
from .liveness import Liveness

BURST = 32  # actors that start together
PER_S = 2.0  # beyond that: an actor loads its model for longer than it waits here

BUSY = Refusal("busy", "keys are registered one after the other; send the same again")


class AdminService:
    """Answers observers, operators and who enrols; their permissions have been checked.

    Args:
        store: Of the run.
        run: Its name.
        keys: Folder of the broker's keys.
        peers: Table of actors.
        audit: Records the requests that change something.
        enrolment: Registers keys.
        on_change: Makes the broker read its allow-list now.
    """

    def __init__(
        self,
        store: AsyncStore,
        *,
        run: str,
        keys: Path,
        peers: Liveness,
        audit: Audit,
        enrolment: Enrolment,
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._run = run
        self._keys = keys
        self._peers = peers
        self._audit = audit
        self._enrolment = enrolment
        self._on_change = on_change

    async def answer(self, envelope: Envelope, member: Member) -> StatusReply | Receipt | Refusal:
        """Carry out a request."""
        if envelope.run != self._run:
            return Refusal("run", f"run must be {self._run!r}, got {envelope.run!r:.80}")
        try:
            match envelope.message:
                case StatusRequest():
                    return await self._status()
                case RevokeRequest(name):
                    return self._revoke(name, member)
                case DrainRequest(incarnation):
                    return self._drain(incarnation, member)
                case Enrol(public_key):
                    return self._enrol(public_key, member)
                case other:
                    raise AssertionError(f"no request for an administrator: {type(other).__name__}")
        except SettingsError as error:
            return Refusal("malformed", str(error))
        except StoreError as error:
            return Refusal("store", f"the store does not answer; send again later: {error}")

    async def _status(self) -> StatusReply:
        stats = await self._store.run(operations.stats())
        tasks = {"created": stats.created, **stats.by_state}
        names = tuple(sorted(peer.hello.incarnation for peer in self._peers))
        return StatusReply(stats.state, stats.version, tasks, names, self._audit.refusals)

    def _revoke(self, name: str, member: Member) -> Receipt:
        roles = revoke(self._keys, name)
        self._audit.record("revocation asked for", key=name, by=member.name)
        self._on_change()
        return Receipt(f"{name} ({', '.join(roles)}) is off the allow-list")

    def _enrol(self, public_key: str, member: Member) -> Receipt | Refusal:
        answer = self._enrolment.register(public_key, member)
        self._on_change()
        return answer

    def _drain(self, incarnation: str, member: Member) -> Receipt:
        peers = self._peers.named(incarnation)
        if not peers:
            raise SettingsError(
                f"the actor to drain must be one this broker serves, got {incarnation!r:.80}; "
                "ask for the status to see their names, or ask another broker"
            )
        for peer in peers:
            peer.is_draining = True
        self._audit.record("drain asked for", actor=incarnation, by=member.name)
        return Receipt(f"{incarnation} gets no more work")


class Enrolment:
    """Registers a key of its own for each of the actors that share an enrolment key.

    Keeps one holder from filling the table of actors or the broker's disk: keys are registered at a
    bounded rate and up to `broker.max_actors_per_enrolment` at a time. A key counts as used while
    its actor is served here; unused ones are removed.

    Args:
        keys: Where registered keys are kept.
        limit: What bounds their number, as errors name it.
        peers: Table of actors: their keys are in use.
        audit: Records keys that are removed.
        clock: Seconds.
    """

    def __init__(
        self,
        keys: EnrolledKeys,
        *,
        limit: str,
        peers: Liveness,
        audit: Audit,
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._limit = limit
        self._peers = peers
        self._audit = audit
        self._turns = TokenBuckets(at_once=BURST, per_s=PER_S, clock=clock)

    def register(self, public_key: str, member: Member) -> Receipt | Refusal:
        """Register a key for the holder of an enrolment key.

        Raises:
            SettingsError: The key cannot be registered.
        """
        if not self._turns.take(member.tag):
            return BUSY
        name = self._keys.register(public_key.encode(), member.name)
        if name is None:
            text = (
                f"actors of the enrolment key {member.name} must be at most {self._limit}, "
                "got one more; raise it, stop some, or make another enrolment key with "
                "`nyala keys add NAME --role enrolment`"
            )
            return Refusal("full", text)
        return Receipt(name)

    def keep_house(self) -> None:
        """Note which registered keys are in use, and remove those that are not."""
        self._keys.mark_seen(peer.key for peer in self._peers if not self._peers.is_suspect(peer))
        for name in self._keys.forget_unused():
            self._audit.record("unused key removed", key=name)
