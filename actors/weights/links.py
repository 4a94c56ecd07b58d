"""A connection of an actor to one port of the weight plane: the publisher's, or another actor's.

Sends never wait and may be lost: whoever needs an answer asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from broker.protocol.codec import decode, encode
from broker.protocol.weight_messages import MAX_WEIGHTS_FRAME, Peer
from broker.transport.keys import KeyPair
from broker.transport.sockets import connect_dealer
from configs.errors import RecordError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Caller:
    """As whom an actor speaks at every port."""

    keys: KeyPair
    run: str
    incarnation: str


class WeightLink:
    """One connection, made in the background.

    Args:
        context: Of the socket.
        port: Where to, and whose key must be there.
        caller: Who speaks.
        take: Receives each message.
        may_queue: Whether requests wait for the connection; else they are lost without one.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        port: Peer,
        *,
        caller: Caller,
        take: Callable[[object], None],
        may_queue: bool = False,
    ) -> None:
        self._caller = caller
        self._take = take
        self._socket = connect_dealer(
            context,
            port.endpoint,
            keys=caller.keys,
            server_key=port.public_key.encode(),
            max_message_bytes=MAX_WEIGHTS_FRAME,
            may_queue=may_queue,
        )

    def post(self, message: object) -> bool:
        """Send if the connection, or its queue, takes it."""
        frame = encode(message, run=self._caller.run, incarnation=self._caller.incarnation, seq=0)
        sending = self._socket.send(frame, flags=zmq.NOBLOCK)  # settled when it returns
        assert isinstance(sending, asyncio.Future)
        return sending.exception() is None

    async def read(self) -> None:
        """Hand every message on until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                envelope = decode(frames[0], max_bytes=MAX_WEIGHTS_FRAME)
            except RecordError as error:
                log.warning("malformed message ignored", reason=str(error))
            else:
                self._take(envelope.message)

    def close(self) -> None:
        """Close it; what was not sent is lost."""
        self._socket.close(linger=0)
