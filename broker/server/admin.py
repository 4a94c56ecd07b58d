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
from buffer import operations
from buffer.store import AsyncStore
from configs.errors import SettingsError, StoreError

from .audit import Audit
from .enrolment import Enrolment
from .liveness import Liveness


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
        peer = self._peers.get(incarnation)
        if peer is None:
            raise SettingsError(
                f"the actor to drain must be one this broker serves, got {incarnation!r:.80}; "
                "ask for the status to see their names, or ask another broker"
            )
        peer.is_draining = True
        self._audit.record("drain asked for", actor=incarnation, by=member.name)
        return Receipt(f"{incarnation} gets no more work")
