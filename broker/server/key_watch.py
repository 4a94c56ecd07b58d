"""Follows the broker's own key while it serves: a new `broker.key` is taken up without a stop.

The listening end of the socket is closed and opened again, which cuts its connections. Actors come
back within seconds, with the public key that was announced to them, and send again what was not
answered; leases outlast it, and no process ends.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
import zmq

from broker.transport.keys import KeyPair, load_pair
from broker.transport.router import Router
from broker.transport.sockets import bound_endpoint
from configs.errors import SettingsError

from .audit import Audit

BIND_TRIES = 50
BIND_PAUSE_S = 0.1  # the old end closes in the background; for so long actors try again

log = structlog.get_logger()


class Listener:
    """The listening end of a broker's socket.

    Args:
        router: Bound, with `pair`.
        keys: Folder with `broker.key`.
        pair: The broker's key now.
        audit: Is told of a new key.
    """

    def __init__(self, router: Router, keys: Path, *, pair: KeyPair, audit: Audit) -> None:
        self._router = router
        self._keys = keys
        self._pair = pair
        self._audit = audit
        self._refused: str | None = None

    async def look(self) -> None:
        """Take up another key if there is one; one that cannot be used is reported and left."""
        try:
            pair = load_pair(self._keys, "broker")
        except SettingsError as error:
            if str(error) != self._refused:
                log.warning("the broker keeps its key: the file cannot be used", reason=str(error))
            self._refused = str(error)
            return
        self._refused = None
        if pair != self._pair:
            await self._listen_with(pair)

    async def _listen_with(self, pair: KeyPair) -> None:
        socket = self._router.socket
        endpoint = bound_endpoint(socket)
        socket.unbind(endpoint)
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        for left in reversed(range(BIND_TRIES)):
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError:
                if not left:
                    raise
                self._router.look()
                await asyncio.sleep(BIND_PAUSE_S)
        self._router.look()
        self._pair = pair
        self._audit.note("broker key exchanged", public_key=pair.public.decode())
