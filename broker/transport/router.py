"""A ROUTER on an event loop: a message that has arrived is read at once, a reply sent at once.

`zmq.asyncio` makes a future for every call and polls the socket several times around it, which
took a fifth of the broker's time for small messages. Here a future is made only to wait.
"""

from __future__ import annotations

import asyncio

import zmq


class Router:
    """Reads and writes a bound ROUTER; for one reading task of the running loop.

    Args:
        socket: Not of `zmq.asyncio`. Any other user of it calls `wake_reader` afterwards.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._descriptor = socket.fileno()
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether `receive` waits, and has read all that arrived."""
        return self._arrival is not None and not self._arrival.done()

    async def receive(self) -> list[zmq.Frame]:
        """Return the next message; does not yield to other tasks if one is there."""
        while True:
            try:
                return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._wait()

    def send(self, route: bytes, frame: bytes) -> None:
        """Queue a message for a peer.

        Raises:
            zmq.ZMQError: the peer is gone (EHOSTUNREACH), or its queue is full (EAGAIN).
        """
        try:
            self.socket.send_multipart((route, frame), zmq.NOBLOCK)
        finally:
            self.wake_reader()

    def wake_reader(self) -> None:
        """Let `receive` try again: any call of the socket may consume the sign of an arrival."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _wait(self) -> None:
        self._arrival = self._loop.create_future()
        # Only until then: ZeroMQ's descriptor stays readable until the socket is used.
        self._loop.add_reader(self._descriptor, self.wake_reader)
        try:
            await self._arrival
        finally:
            self._loop.remove_reader(self._descriptor)
            self._arrival = None
