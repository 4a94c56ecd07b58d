"""What observers and operators may ask of a broker: how the run is, to revoke a key, to drain.

Like the service, it has no state of its own and knows no socket. A revocation changes the folder of
this broker's keys; brokers with a folder of their own are asked one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.protocol.codec import Envelope
from broker.protocol.messages import (
    DrainRequest,
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
from .liveness import Liveness


class Desk:
    """Answers observers and operators, whose rights have been checked.

    Args:
        store: Of the run.
        run: Its name.
        peers: Who has said HELLO.
        keys: Folder of the broker's keys.
        audit: Is told who did what.
        on_revoked: Makes the broker look at its allow-list now.
    """

    def __init__(
        self,
        store: AsyncStore,
        *,
        run: str,
        peers: Liveness,
        keys: Path,
        audit: Audit,
        on_revoked: Callable[[], None],
    ) -> None:
        self._store = store
        self._run = run
        self._peers = peers
        self._keys = keys
        self._audit = audit
        self._on_revoked = on_revoked

    async def answer(self, envelope: Envelope, member: Member) -> StatusReply | Receipt | Refusal:
        """Do what a message asks for."""
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
                case other:
                    raise AssertionError(f"no request to the desk: {type(other).__name__}")
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
        self._audit.note("revocation asked for", key=name, by=member.name)
        self._on_revoked()
        return Receipt(f"{name} ({', '.join(roles)}) is off the allow-list")

    def _drain(self, incarnation: str, member: Member) -> Receipt:
        peer = self._peers.get(incarnation)
        if peer is None:
            raise SettingsError(
                f"the actor to drain must be one this broker serves, got {incarnation!r:.80}; "
                "ask for the status to see their names, or ask another broker"
            )
        peer.is_draining = True
        self._audit.note("drain asked for", actor=incarnation, by=member.name)
        return Receipt(f"{incarnation} gets no more work")
