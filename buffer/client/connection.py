"""Pipelined connection of an event loop to Redis: many calls at once, answered in order.

redis-py opens the connection, with the options of an address (TLS, sentinels, a password, the
greeting of `server_identity.py`). From then on a call is one write and one future. Through
redis-py's own client a call costs the broker three to five times as much, more than all its other
work for a heartbeat.

Nothing is ever sent twice: when a connection ends, all calls that wait on it fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
import redis
from redis.asyncio import Redis
from redis.asyncio.connection import DefaultParser

from buffer.operations.operation import Argument, Reply

from .address import disconnect_async

COPIED_BYTES = 2048
"""Length up to which arguments are copied together; a longer one is written by itself."""

CLOSED = "Connection closed by server."
HUNG_UP = "this client has been closed"

parse_error: Any = DefaultParser.parse_error  # the library's own classes of Redis' errors


def stream_of(opened: Any) -> tuple[Any, Any]:
    """Return reader and writer of an open connection; redis-py has no public names for them."""
    return opened._reader, opened._writer


@dataclass(slots=True)
class _PendingCommands:
    """Commands that went out together."""

    answered: asyncio.Future[list[Reply]]
    missing: int
    replies: list[Reply] = field(default_factory=list)


class PipelinedConnection:
    """A connection for calls, opened again after it has ended."""

    def __init__(self, client: Redis) -> None:
        """Prepare; nothing is sent before the first call.

        Args:
            client: Client whose address, password, greeting and `socket_timeout` are used.
        """
        self._pool: Any = client.connection_pool
        self._timeout_s: float | None = self._pool.connection_kwargs["socket_timeout"]
        self._stream: _Stream | None = None
        self._dialling: asyncio.Task[_Stream] | None = None
        self._is_closed = False

    async def execute_commands(self, *commands: Sequence[Argument]) -> list[Reply]:
        """Send commands together; return their replies, of which any may be a `RedisError`.

        Raises:
            redis.ConnectionError: There is no connection, or it ended; Redis may have acted.
            redis.TimeoutError: No answer came in time, and the connection is closed; other calls
                on it fail.
            redis.RedisError: The server refused the connection or its greeting.
        """
        pieces = packed(commands)
        stream = self._stream
        if stream is None or not stream.is_open or stream.primary != self._primary:
            stream = await self._dial()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await stream.request_replies(pieces, len(commands))
        except TimeoutError:
            stream.close("Redis did not answer another call in time")
            raise redis.TimeoutError("Timeout reading from socket") from None

    async def close(self) -> None:
        """Close for good; later calls fail."""
        self._is_closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        if self._stream is not None:
            await self._stream.hang_up()

    @property
    def _primary(self) -> object:
        """Address of the primary that the sentinels named last; None without sentinels."""
        return getattr(self._pool, "master_address", None)

    async def _dial(self) -> _Stream:
        """Connect; calls that come meanwhile share the outcome."""
        if self._is_closed:
            raise redis.ConnectionError(HUNG_UP)
        dialling = self._dialling
        if dialling is None:
            dialling = self._dialling = asyncio.create_task(self._connect())
        await asyncio.wait([dialling])  # a caller that gives up does not end it for the others
        if self._dialling is dialling:
            self._dialling = None
        if dialling.cancelled():
            raise redis.ConnectionError(HUNG_UP)
        return dialling.result()

    async def _connect(self) -> _Stream:
        if self._stream is not None:
            await self._stream.hang_up()
        opened = self._pool.make_connection()
        try:
            await opened.connect()
            stream = _Stream(opened, self._primary)
        except BaseException:
            await opened.disconnect(nowait=True)
            raise
        self._stream = stream
        return stream


class Connections:
    """The connections of an event loop to one server."""

    def __init__(self, client: Redis) -> None:
        """Take a client of the server, which is closed with the connections."""
        self._client = client
        self.calls = PipelinedConnection(client)
        self.records = PipelinedConnection(client)
        """Connection for records, so that no other call waits while megabytes go out."""

    async def close(self) -> None:
        """Close for good; later calls fail."""
        await self.calls.close()
        await self.records.close()
        await disconnect_async(self._client)


class _Stream(asyncio.Protocol):
    """The stream of one connection, open or ended."""

    def __init__(self, opened: Any, primary: object) -> None:
        """Take the stream of a connection of redis-py, on which no reply is under way.

        Raises:
            redis.ConnectionError: The connection has ended already.
        """
        self._opened = opened
        self._pending: deque[_PendingCommands] = deque()
        self._replies = hiredis.Reader(protocolError=redis.InvalidResponse, replyError=parse_error)
        self._writable = asyncio.Event()
        self._writable.set()
        self._why_ended = CLOSED
        self.primary = primary
        self.is_open = True
        reader, writer = stream_of(opened)
        if reader.at_eof() or writer.is_closing():  # no callback would follow
            raise redis.ConnectionError(CLOSED)
        self._transport: asyncio.Transport = writer.transport
        self._transport.set_protocol(self)

    async def request_replies(self, pieces: Sequence[bytes], num_replies: int) -> list[Reply]:
        while not self._writable.is_set():
            await self._writable.wait()
        if not self.is_open:
            raise redis.ConnectionError(self._why_ended)
        answered: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._pending.append(_PendingCommands(answered, num_replies))
        self._transport.writelines(pieces)
        return await answered

    def close(self, why: str = CLOSED) -> None:
        self._why_ended = why
        self.is_open = False
        self._transport.abort()

    async def hang_up(self) -> None:
        self.close(HUNG_UP)
        await self._opened.disconnect(nowait=True)  # else it would warn of an open connection

    def data_received(self, data: bytes) -> None:
        """Read replies from arrived bytes (`asyncio.Protocol`)."""
        self._replies.feed(data)
        # Bytes that are no reply, or a reply to no call, raise here and end the connection.
        while (reply := self._replies.gets()) is not False:
            self._take(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending calls (`asyncio.Protocol`)."""
        self.is_open = False
        self._writable.set()
        for pending in self._pending:
            if not pending.answered.done():
                pending.answered.set_exception(redis.ConnectionError(str(exc or self._why_ended)))
        self._pending.clear()

    def pause_writing(self) -> None:
        """Hold back further calls, because Redis reads too slowly (`asyncio.Protocol`)."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Send calls again, because Redis has caught up (`asyncio.Protocol`)."""
        self._writable.set()

    def _take(self, reply: Reply) -> None:
        pending = self._pending[0]
        pending.replies.append(reply)
        pending.missing -= 1
        if not pending.missing:
            self._pending.popleft()
            if not pending.answered.done():  # else its caller has given up
                pending.answered.set_result(pending.replies)
        if isinstance(
            reply, redis.ReadOnlyError
        ):  # no longer the primary: the sentinels name the new one
            self.close("the server is no longer the primary")


def packed(commands: Sequence[Sequence[Argument]]) -> list[bytes]:
    """Write commands in Redis' protocol (RESP); return the pieces to send."""
    pieces: list[bytes] = []
    short: list[bytes] = []
    for command in commands:
        short.append(b"*%d\r\n" % len(command))
        for argument in command:
            value = argument if isinstance(argument, bytes) else str(argument).encode()
            if len(value) <= COPIED_BYTES:
                short.append(b"$%d\r\n%b\r\n" % (len(value), value))
                continue
            short.append(b"$%d\r\n" % len(value))
            pieces += (b"".join(short), value)
            short = [b"\r\n"]
    pieces.append(b"".join(short))
    return pieces
