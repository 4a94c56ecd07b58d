"""A TCP proxy that delays, blocks, resets or half-closes its connections on demand.

`network.py` puts one actor behind it. It runs an event loop in a thread of its own; every method
may be called from other threads. Peers do not see the proxy: a black hole looks like lost packets,
not like a closed connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from configs.worker import Worker

CHUNK_BYTES = 2**16
MAX_PIECES = 64  # on their way in one direction of a connection
STOP_S = 5.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing sends RST


class _Link:
    """One connection through the proxy."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.is_deaf = False
        """Bytes of the near side are discarded silently."""


class Proxy:
    """Stands between an actor and the broker.

    Example:
        with Proxy("127.0.0.1", 5757) as proxy:
            connect_to(proxy.port)
            proxy.delay(0.3)
            proxy.block()
            proxy.flow()
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._loop = asyncio.new_event_loop()
        self._worker = Worker(self._loop.run_forever, name="proxy")
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay_s = self._lag_s = self._linger_s = 0.0
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def __enter__(self) -> Proxy:
        self._worker.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(STOP_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.join(STOP_S)
        self._loop.close()

    def flow(self) -> None:
        """Pass everything on again, without delay."""
        self._delay_s = self._lag_s = self._linger_s = 0.0
        self._loop.call_soon_threadsafe(self._flowing.set)

    def settle(self) -> None:
        """Wait until earlier calls have taken effect."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(STOP_S)

    def delay(self, seconds: float) -> None:
        """Delay every piece by `seconds`, one after the other."""
        self._delay_s = seconds

    def lag(self, seconds: float) -> None:
        """Deliver every piece `seconds` later, as a long line does, at the same rate."""
        self._lag_s = seconds

    def block(self) -> None:
        """Pass on nothing in either direction, and keep connections open."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def lead_to(self, host: str, port: int) -> None:
        """Connect later peers to this address instead."""
        self._target = host, port

    def reset(self) -> None:
        """End every connection with RST."""
        self._loop.call_soon_threadsafe(self._on_links, _abort_both)

    def close_slowly(self, seconds: float) -> None:
        """End every connection for the actor now, and for the broker after `seconds`."""
        self._linger_s = seconds
        self._loop.call_soon_threadsafe(self._on_links, lambda link: link.near.close())

    def half_open(self) -> None:
        """End every connection for the broker; the actor's stays open and leads nowhere."""

        def cut(link: _Link) -> None:
            link.is_deaf = True
            _abort(link.far)

        self._loop.call_soon_threadsafe(self._on_links, cut)

    def _on_links(self, act: object) -> None:
        assert callable(act)
        for link in list(self._links):
            act(link)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        self._on_links(_abort_both)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio complains aloud when one of its own is cancelled.
        task = asyncio.create_task(self._serve(reader, near))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            back, far = await asyncio.open_connection(*self._target)
        except OSError:  # no broker at this moment: as if there were no listener here either
            _abort(near)
            return
        link = _Link(near, far)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pump(reader, far, link), self._pump(back, near, link, is_back=True)
            )
        finally:
            self._links.discard(link)
            _abort_both(link)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        link: _Link,
        *,
        is_back: bool = False,
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_PIECES)
        reading = asyncio.create_task(self._read(reader, pieces))
        try:
            await self._pass_on(pieces, writer, link)
        finally:
            reading.cancel()
        if link.is_deaf and is_back:
            return  # the broker's end is not passed on
        await asyncio.sleep(self._linger_s)
        writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        """Read bytes of a peer, with the time at which the other peer gets them."""
        piece = b"-"
        while piece:
            piece = b""  # the end, also of a peer that was reset
            with suppress(OSError):
                piece = await reader.read(CHUNK_BYTES)
            await pieces.put((self._loop.time() + self._lag_s, piece))
            if not self._lag_s:
                await pieces.join()  # a fast sender waits until its bytes are passed on

    async def _pass_on(
        self,
        pieces: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        link: _Link,
    ) -> None:
        """Deliver pieces until the end of the connection."""
        with suppress(OSError):  # a peer that ended is what a proxy is for
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(due - self._loop.time())
                if not piece:
                    return
                await self._flowing.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if not link.is_deaf:
                    writer.write(piece)
                    await writer.drain()
                pieces.task_done()


def _abort(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):  # it has ended by itself
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


def _abort_both(link: _Link) -> None:
    _abort(link.near)
    _abort(link.far)
