"""Requests of observers, operators and enrolling actors: run status, revocation, drains, enrolment.

Has no socket, like the service. A revocation or an enrolment changes the keys folder of this
broker; each broker with a folder of its own needs a request of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from broker.protocol.codec import Envelope
from broker.protocol.messages import (
    MAX_RUN_SNAPSHOT,
    MAX_SEEN,
    ActorState,
    DrainRequest,
    Enrol,
    Receipt,
    Refusal,
    RevokeRequest,
    StatusReply,
    StatusRequest,
)
from broker.transport.allow_list import AllowListEntry, revoke
from broker.transport.enrolled import EnrolledKeys
from buffer import operations
from buffer.sampling import closed_lines, groups_in_flight, why_nobody_samples
from buffer.store import AsyncStore
from configs.errors import SettingsError, StoreError, quoted
from configs.settings import Settings

from .audit import Audit
from .flow_control import TokenBuckets
from .liveness import Liveness
from .validation import refuse_run, refuse_without_store

BURST = 32  # actors that start together
STATUS_S = 0.5  # observers cost the store five short calls this often, however many they are
MAX_CLOSED = 8
PER_S = 2.0  # after such a burst; loading a model takes longer than the wait

BUSY = Refusal("busy", "this enrolment key registers keys too fast; send the same again later")


class AdminService:
    """Answers observers, operators and enrolling actors; their permissions have been checked.

    Args:
        store: Store of the run.
        settings: Settings of the run.
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
        settings: Settings,
        keys: Path,
        peers: Liveness,
        audit: Audit,
        enrolment: Enrolment,
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._keys = keys
        self._peers = peers
        self._audit = audit
        self._enrolment = enrolment
        self._on_change = on_change
        self._status_lock = asyncio.Lock()
        self._state: StatusReply | None = None
        self._state_at = 0.0

    async def answer(
        self, envelope: Envelope, member: AllowListEntry
    ) -> StatusReply | Receipt | Refusal:
        """Carry out a request and return its answer.

        A revocation removes the key's files, a drain ends the leasing to an actor, and an enrolment
        writes a file. A status is at most `STATUS_S` old.

        Returns:
            The status or a receipt; or a refusal of the code `run`, `malformed` (a name or key that
            cannot be used, or a folder that cannot be written), `store`, `busy` or `full`.
        """
        run = self._settings.run.name
        if envelope.run != run:
            return refuse_run(run, envelope.run)
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
            return refuse_without_store(error)

    async def _status(self) -> StatusReply:
        """Describe the run, from a reading of the store that is reused for `STATUS_S`."""
        async with self._status_lock:
            now = time.monotonic()
            if self._state is None or now - self._state_at >= STATUS_S:
                self._state, self._state_at = await self._read_state(), now
        names = tuple(sorted(peer.hello.incarnation for peer in self._peers))
        return replace(self._state, actors=names, refusals=self._audit.refusals)

    async def _read_state(self) -> StatusReply:
        ask, settings = self._store.run, self._settings
        stats, seen = await ask(operations.stats()), await ask(operations.actors())
        max_run_bytes = settings.buffer.max_run_bytes
        memory = await ask(operations.memory(of_run=max_run_bytes is not None))
        closed = await ask(operations.closed())
        idle = why_nobody_samples(
            stats,
            seen,
            memory,
            closed,
            folder=settings.run.folder,
            heartbeat_timeout_s=settings.broker.heartbeat_timeout_s,
            pause_at_memory=settings.buffer.pause_at_memory,
            max_run_bytes=max_run_bytes,
            num_processes=sum(not self._peers.is_suspect(peer) for peer in self._peers),
        )
        seen.sort(key=lambda actor: actor.silent_s)
        run_snapshot = await ask(operations.read_run_snapshot()) or b""
        return StatusReply(
            state=stats.state,
            version=stats.version,
            tasks={"created": stats.created, **stats.by_state},
            actors=(),
            refusals={},
            steps=settings.run.steps,
            seen=tuple(ActorState(*actor) for actor in seen[:MAX_SEEN]),
            silent_after_s=settings.broker.heartbeat_timeout_s,
            groups=groups_in_flight(stats, settings.run, settings.buffer),
            memory=memory.share,
            closed=tuple(closed_lines(closed, settings.run.folder)[:MAX_CLOSED]),
            idle=idle if idle and not all(claim.sealed for claim in stats.claims) else "",
            run_snapshot=run_snapshot if len(run_snapshot) <= MAX_RUN_SNAPSHOT else b"",
        )

    def _revoke(self, name: str, member: AllowListEntry) -> Receipt:
        roles = revoke(self._keys, name)
        self._audit.record("revocation asked for", key=name, by=member.name)
        self._on_change()
        return Receipt(f"{name} ({', '.join(roles)}) is off the allow-list")

    def _enrol(self, public_key: str, member: AllowListEntry) -> Receipt | Refusal:
        answer = self._enrolment.register(public_key, member)
        self._on_change()
        return answer

    def _drain(self, incarnation: str, member: AllowListEntry) -> Receipt:
        peers = self._peers.named(incarnation)
        if not peers:
            raise SettingsError(
                f"the actor to drain must be one that this broker serves, got "
                f"{quoted(incarnation)}; the status lists those that it serves, and other brokers "
                "may serve more"
            )
        for peer in peers:
            peer.is_draining = True
        self._audit.record("drain asked for", actor=incarnation, by=member.name)
        return Receipt(f"{incarnation} gets no more work")


class Enrolment:
    """Registers a key of its own for each of the actors that share an enrolment key.

    Keeps one holder from filling the table of actors or the broker's disk: keys are registered at a
    bounded rate and up to `broker.max_actors_per_enrolment` at a time. A key counts as used while
    its actor is served here; `keep_house` removes unused ones.

    Args:
        keys: Registered keys.
        limit: The setting that bounds their number, for errors.
        peers: Table of actors, whose keys are in use.
        audit: Records keys that are removed.
        clock: Returns monotonic seconds.
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

    def register(self, public_key: str, member: AllowListEntry) -> Receipt | Refusal:
        """Register a key for the holder of an enrolment key.

        Returns:
            The name of the key; or a refusal, `busy` or `full`.

        Raises:
            SettingsError: The key cannot be registered.
        """
        if not self._turns.take_token(member.tag):
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
        """Note the registered keys that are in use, and delete the files of unused ones."""
        self._keys.mark_seen(peer.key for peer in self._peers if not self._peers.is_suspect(peer))
        for name in self._keys.forget_unused():
            self._audit.record("unused key removed", key=name)
