"""The one connection of an actor to the weight publisher, which may move or restart at any time.

Says JOIN every two seconds; hands every message on. Sends never wait and may be lost: whoever needs
an answer asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
import zmq
import zmq.asyncio

from broker.codec import decode, encode
from broker.keys import KeyPair
from broker.messages import Publication
from broker.sockets import connect_dealer
from broker.weights import JOIN_EVERY_S, MAX_WEIGHTS_FRAME, Join
from configs.errors import RecordError

log = structlog.get_logger()
UNSENT_WAIT_S = 0.05
"""Pause while there is no connection: the first JOIN should follow it at once."""


class PublisherLink:
    """Connects to where the newest publication points.

    Args:
        keys: This actor's key pair.
        run: Name of the run.
        incarnation: This life of the actor.
        join: Makes the JOIN of this moment.
        take: Receives each message.
    """

    def __init__(
        self,
        *,
        keys: KeyPair,
        run: str,
        incarnation: str,
        join: Callable[[], Join],
        take: Callable[[object], None],
    ) -> None:
        self._keys = keys
        self._run = run
        self._incarnation = incarnation
        self._join = join
        self._take = take
        self._place: tuple[str, str] | None = None
        self._moved = asyncio.Event()
        self._socket: zmq.asyncio.Socket | None = None

    def follow(self, publication: Publication) -> None:
        """Connect there, if it is another place than the present one."""
        place = (publication.endpoint, publication.public_key)
        if place != self._place:
            self._place = place
            self._moved.set()

    def post(self, message: object) -> bool:
        """Send if there is a connection that takes it."""
        if self._socket is None:
            return False
        frame = encode(message, run=self._run, incarnation=self._incarnation, seq=0)
        sending = self._socket.send(frame, flags=zmq.NOBLOCK)  # settled when it returns
        assert isinstance(sending, asyncio.Future)
        return sending.exception() is None

    async def run(self) -> None:
        """Stay connected until cancelled."""
        context = zmq.asyncio.Context()
        try:
            await self._moved.wait()
            while self._place is not None:
                endpoint, public_key = self._place
                self._moved.clear()
                self._socket = connect_dealer(
                    context,
                    endpoint,
                    keys=self._keys,
                    server_key=public_key.encode(),
                    max_message_bytes=MAX_WEIGHTS_FRAME,
                )
                await self._serve(self._socket)
        finally:
            self._socket = None
            context.destroy(linger=0)

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        """Read and say JOIN until the publisher has moved."""
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._read(socket)), tasks.create_task(self._say_join())]
            await self._moved.wait()
            for task in working:
                task.cancel()
        socket.close(linger=0)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                envelope = decode(frames[0], max_bytes=MAX_WEIGHTS_FRAME)
            except RecordError as error:
                log.warning("malformed message ignored", reason=str(error))
            else:
                self._take(envelope.message)

    async def _say_join(self) -> None:
        while True:
            is_sent = self.post(self._join())
            await asyncio.sleep(JOIN_EVERY_S if is_sent else UNSENT_WAIT_S)
