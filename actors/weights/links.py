"""Connections of an actor to the ports of the weight plane: the publisher's, and other actors'.

Sends never wait and may be lost: a sender that needs an answer asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from broker.protocol.codec import decode, encode
from broker.protocol.messages import Publication
from broker.protocol.weight_messages import JOIN_EVERY_S, MAX_WEIGHTS_FRAME, Join, PeerEndpoint
from broker.transport.keys import KeyPair
from broker.transport.sockets import connect_dealer
from broker.weights.port import SILENCE_MS
from configs.errors import RecordError

log = structlog.get_logger()

UNSENT_WAIT_S = 0.05
"""Pause while there is no connection: the first JOIN should follow it at once."""


@dataclass(frozen=True, slots=True)
class ActorIdentity:
    """Identity of an actor at every port."""

    keys: KeyPair
    run: str
    incarnation: str


class WeightLink:
    """One connection, made in the background.

    Args:
        context: ZeroMQ context of the socket.
        port: Address, and the public key of the other end.
        caller: Identity of this end.
        on_message: Receives each message.
        may_queue: Requests wait for the connection; otherwise they are lost without one.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        port: PeerEndpoint,
        *,
        caller: ActorIdentity,
        on_message: Callable[[object], None],
        may_queue: bool = False,
    ) -> None:
        self._caller = caller
        self._on_message = on_message
        self._socket = connect_dealer(
            context,
            port.endpoint,
            keys=caller.keys,
            server_key=port.public_key.encode(),
            max_message_bytes=MAX_WEIGHTS_FRAME,
            may_queue=may_queue,
            silence_ms=SILENCE_MS,
        )

    def post(self, message: object) -> bool:
        """Send a message; False if neither connection nor queue takes it."""
        frame = encode(message, run=self._caller.run, incarnation=self._caller.incarnation, seq=0)
        sending = self._socket.send(frame, flags=zmq.NOBLOCK)  # settled when it returns
        assert isinstance(sending, asyncio.Future)
        return sending.exception() is None

    async def read(self) -> None:
        """Pass every message on until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                envelope = decode(frames[0], max_bytes=MAX_WEIGHTS_FRAME)
            except RecordError as error:
                log.warning("malformed message ignored", reason=str(error))
            else:
                self._on_message(envelope.message)

    def close(self) -> None:
        """Close the socket; unsent messages are lost."""
        self._socket.close(linger=0)


class PublisherLink:
    """The one connection to the publisher, which may move or restart at any time.

    Sends JOIN every two seconds and passes every message on.

    Args:
        caller: Identity of this end.
        join: Makes a JOIN with the present state.
        on_message: Receives each message.
    """

    def __init__(
        self,
        *,
        caller: ActorIdentity,
        join: Callable[[], Join],
        on_message: Callable[[object], None],
    ) -> None:
        self._caller = caller
        self._join = join
        self._on_message = on_message
        self._port: PeerEndpoint | None = None
        self._moved = asyncio.Event()
        self._link: WeightLink | None = None

    def follow(self, publication: Publication) -> None:
        """Connect to the endpoint of a publication, unless that is the present one."""
        port = PeerEndpoint(publication.endpoint, publication.public_key)
        if port != self._port:
            self._port = port
            self._moved.set()

    def post(self, message: object) -> bool:
        """Send a message; False if there is no connection that takes it."""
        return self._link is not None and self._link.post(message)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        context = zmq.asyncio.Context()
        try:
            await self._moved.wait()
            while self._port is not None:
                port = self._port
                self._moved.clear()
                self._link = WeightLink(
                    context, port, caller=self._caller, on_message=self._on_message
                )
                await self._serve(self._link)
        finally:
            self._link = None
            context.destroy(linger=0)

    async def _serve(self, link: WeightLink) -> None:
        """Read, and send JOINs, until the publisher has moved."""
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(link.read()), tasks.create_task(self._send_joins())]
            await self._moved.wait()
            for task in working:
                task.cancel()
        link.close()

    async def _send_joins(self) -> None:
        while True:
            is_sent = self.post(self._join())
            await asyncio.sleep(JOIN_EVERY_S if is_sent else UNSENT_WAIT_S)
