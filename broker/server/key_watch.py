"""Watch over the keys folder while the broker serves: revoked peers, and the broker's own new key.

When a key is taken off the allow-list, the dispatcher refuses all its messages from then on. Here
its incarnations are removed, so that their waiting LEASE requests get nothing. No heartbeat
prolongs their leases, which go to others when `broker.lease_timeout_s` is over.

For a new `broker.key` the listening end of the socket is closed and opened again, which cuts its
connections. Actors come back within seconds, with the public key that was announced to them, and
repeat unanswered requests. Leases outlast the exchange, and no process ends.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
import zmq

from broker.transport.allow_list import AllowList
from broker.transport.keys import KeyPair, load_pair
from broker.transport.sockets import Router, bound_endpoint
from configs.errors import SettingsError

from .audit import Audit
from .liveness import Liveness

KEY_CHECK_S = 0.5  # with the time of one message, a removed key is refused within a second
BIND_TRIES = 50
BIND_PAUSE_S = 0.1  # the old end closes in the background; for so long actors try again

log = structlog.get_logger()


class KeyWatch:
    """Applies changes of one broker's keys folder.

    Args:
        router: Bound socket, with `pair`.
        allowed: The allow-list that messages are judged by.
        keys: Folder with `broker.key`.
        pair: The broker's key now.
        peers: Table of actors; those of a revoked key are removed.
        audit: Records what has changed.

    Raises:
        OSError: This process can open no more files, as from every method.
    """

    def __init__(
        self,
        router: Router,
        allowed: AllowList,
        *,
        keys: Path,
        pair: KeyPair,
        peers: Liveness,
        audit: Audit,
    ) -> None:
        self._router = router
        self._allowed = allowed
        self._keys = keys
        self._pair = pair
        self._peers = peers
        self._audit = audit
        self._reported: str | None = None
        allowed.refresh()
        self._members = allowed.members()

    async def apply_key_changes(self) -> None:
        """Apply all changes of the folder; a broker key that cannot be used is only logged.

        Raises:
            zmq.ZMQError: The address could not be listened on again with a new key, within
                `BIND_TRIES * BIND_PAUSE_S`.
        """
        self.check_allow_list()
        await self._check_broker_key()

    def check_allow_list(self) -> None:
        """Read the list if it has changed; forget the actors of keys that left or changed role."""
        self._allowed.refresh()
        before, now = self._members, self._allowed.members()
        if now is before:
            return
        self._members = now
        for key, member in before.items():
            successor = now.get(key)
            if successor is None or successor.role is not member.role:
                actors = self._peers.forget_key(key.decode())
                self._audit.record("revoked", key=member.name, role=member.role, actors=actors)
        for key, member in now.items():
            if key not in before:
                self._audit.record("allowed", key=member.name, role=member.role)

    async def _check_broker_key(self) -> None:
        """Adopt a new key; report a key that cannot be used, and keep the old one."""
        try:
            pair = load_pair(self._keys, "broker")
        except SettingsError as error:
            if str(error) != self._reported:
                log.warning("the broker keeps its key: the file cannot be used", reason=str(error))
            self._reported = str(error)
            return
        self._reported = None
        if pair != self._pair:
            await self._listen_with(pair)

    async def _listen_with(self, pair: KeyPair) -> None:
        socket = self._router.socket
        endpoint = bound_endpoint(socket)
        socket.unbind(endpoint)
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        for tries_left in reversed(range(BIND_TRIES)):
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError:
                if not tries_left:
                    raise
                self._router.wake_reader()
                await asyncio.sleep(BIND_PAUSE_S)
        self._router.wake_reader()
        self._pair = pair
        self._audit.record("broker key exchanged", public_key=pair.public.decode())
