"""A ROUTER on an event loop: what has arrived is read at once, and a reply leaves at once.

`zmq.asyncio` makes a future for every call and looks at the socket several times around it, which
took a fifth of the broker's time for small messages. Here a future is made only to wait.
"""

from __future__ import annotations

import asyncio

import zmq


class Router:
    """Reads and writes a bound ROUTER; for one reading task of the running loop.

    Args:
        socket: Not of `zmq.asyncio`. Whoever else uses it calls `look` afterwards.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._descriptor = socket.fileno()
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None

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
            self.look()

    def look(self) -> None:
        """Look for messages: any call of the socket may take the sign that one has arrived."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _wait(self) -> None:
        self._news = self._loop.create_future()
        # Only while nobody reads: ZeroMQ's descriptor stays readable until the socket is looked at.
        self._loop.add_reader(self._descriptor, self.look)
        try:
            await self._news
        finally:
            self._loop.remove_reader(self._descriptor)
            self._news = None
