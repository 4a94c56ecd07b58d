"""Ports at which actors ask for weights: the publisher's, and that of each actor that shares.

Owns the socket and access to it, not versions. Only messages from keys of actors are decoded. Sends
never wait, and an answer that its peer does not read is lost: peers repeat important requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import structlog
import zmq
import zmq.asyncio

from broker.protocol.codec import WIRE_VERSION, decode, encode, is_known_to
from broker.protocol.weight_messages import PULL_CREDIT
from broker.transport.allow_list import AllowList, Role
from broker.transport.keys import KeyPair
from broker.transport.sockets import bind_router
from broker.transport.zap import ZapAuthenticator
from configs.errors import RecordError

log = structlog.get_logger()

MAX_REQUEST_BYTES = 4096
"""Actors only send small messages."""
SEND_HWM = 4 * PULL_CREDIT  # bounds what is queued for an actor that does not read to 64 MiB
SILENCE_MS = 60_000
"""Time in which a slice of 4 MiB crosses a link of 70 kB/s. A vanished peer is noticed sooner where
a message is under way to it, such as the JOIN of every two seconds."""


class Route(NamedTuple):
    """The way back to a peer."""

    id: bytes
    """Routing id of its connection."""
    version: int = WIRE_VERSION
    """Wire version that the peer reads."""


OnMessage = Callable[[Route, str, str, object], None]
"""Receives (route, key, incarnation, message); raises `RecordError` for a message that it refuses.
The key is the public key that the connection has proved to hold."""


@contextmanager
def open_router(
    context: zmq.asyncio.Context, endpoint: str, *, allowed: Path | AllowList, keys: KeyPair
) -> Iterator[tuple[zmq.asyncio.Socket, ZapAuthenticator]]:
    """Listen for the actors of a run.

    The caller calls the authenticator's `refresh` at intervals.

    Args:
        context: Context without another authenticator.
        endpoint: Address to listen on.
        allowed: Folder of the run's keys, or an allow-list; its actors may connect.
        keys: Key pair of this server.

    Raises:
        SettingsError: The endpoint cannot be listened on.
    """
    with ZapAuthenticator(context, allowed, roles=(Role.ACTOR,)) as authenticator:
        router = bind_router(
            context,
            endpoint,
            keys=keys,
            max_message_bytes=2 * MAX_REQUEST_BYTES,  # of requests; answers may be longer
            send_hwm=SEND_HWM,
            silence_ms=SILENCE_MS,
        )
        try:
            yield router, authenticator
        finally:
            router.close(linger=0)


class WeightPort:
    """Reads a ROUTER of `open_router` and answers on it.

    Args:
        router: The socket.
        run: Name of the run; messages of another are ignored.
        on_message: Receives each message.
        allows: Returns whether the holder of this public key still has access; None = the check at
            connection is enough.
    """

    def __init__(
        self,
        router: zmq.asyncio.Socket,
        *,
        run: str,
        on_message: OnMessage,
        allows: Callable[[str], bool] | None = None,
    ) -> None:
        self._router = router
        self._run = run
        self._on_message = on_message
        self._allows = allows

    async def read(self) -> None:
        """Read the socket until cancelled.

        Messages of keys without access are ignored, those that are malformed or refused are logged.
        """
        while True:
            frames = await self._router.recv_multipart(copy=False)
            key = str(frames[-1].get("User-Id"))
            if len(frames) != 2 or not self._has_access(key):
                continue
            try:
                envelope = decode(frames[1].bytes, max_bytes=MAX_REQUEST_BYTES)
                if envelope.run != self._run:
                    raise RecordError(
                        f"run must be {self._run}, got {envelope.run:.64} from {envelope.inc:.64}; "
                        "start this actor with the settings of its own run"
                    )
                route = Route(frames[0].bytes, envelope.v)
                self._on_message(route, key, envelope.inc, envelope.message)
            except RecordError as error:
                log.warning("malformed message ignored", reason=str(error))

    def post(self, route: Route, message: object) -> bool:
        """Send a message; False if the peer is gone, does not read or has an older version."""
        if not is_known_to(route.version, message):
            return False
        frame = encode(message, run=self._run, incarnation="", seq=0, version=route.version)
        sending = self._router.send_multipart([route.id, frame], flags=zmq.NOBLOCK)
        assert isinstance(sending, asyncio.Future)
        if sending.exception() is not None:  # settled at once: the peer is gone or its queue full
            log.debug("message not sent", message=type(message).__name__)
            return False
        return True

    def _has_access(self, key: str) -> bool:
        return self._allows is None or self._allows(key)
