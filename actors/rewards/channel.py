"""Pipes between an actor and one reward worker: frames both ways, and what the reward prints.

Frames have a socket of their own, so they never mix with what a reward prints. A reward can still
write into any descriptor of its process, so every frame is checked. Prints go to the actor's stderr
up to a bound; the rest is counted and dropped. The actor uses no pipes of asyncio's subprocesses:
it would wait for them as long as any process that the reward has started.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

from configs.child import LENGTH, MalformedFrame, length_of
from configs.errors import DeadlineError

from .frames import MAX_FRAME_BYTES, MalformedReply, Reply, pack_frame, unpack_reply
from .functions import RewardSample

log = structlog.get_logger()

PRINTED_BYTES = 2**16
PRINT_WINDOW_S = 10.0
"""Window in which a worker may print `PRINTED_BYTES`: a traceback a second, or a page of debugging.
"""


class Channel:
    """The actor's ends; `worker_ends` has the others while the worker starts."""

    def __init__(self) -> None:
        """Make socket and pipe; `open` connects them to the event loop."""
        self._here, self._there = socket.socketpair()
        printed, self._prints = os.pipe()
        self._printed = os.fdopen(printed, "rb", buffering=0)
        self._output: asyncio.ReadTransport | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @contextmanager
    def worker_ends(self) -> Iterator[tuple[int, int]]:
        """Descriptors of frames and prints, which the worker inherits; closed after the block."""
        try:
            yield self._there.fileno(), self._prints
        finally:
            self._there.close()
            os.close(self._prints)

    async def open(self) -> None:
        """Begin to read frames and prints."""
        loop = asyncio.get_running_loop()
        self._reader, self._writer = await asyncio.open_connection(sock=self._here)
        self._output, _ = await loop.connect_read_pipe(BoundedOutput, self._printed)

    async def send(self, samples: list[RewardSample], timeout_s: float) -> None:
        """Send the request of a batch.

        Raises:
            DeadlineError: The worker does not read.
            ConnectionError: The worker has ended.
        """
        assert self._writer is not None
        self._writer.write(pack_frame(samples))
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
        except TimeoutError as error:
            raise DeadlineError(
                f"the reward worker must read within {timeout_s:g} s, got nothing read; bound the "
                "time of a call"
            ) from error

    async def receive(self, timeout_s: float) -> Reply | None:
        """Return the next reply; None after the time limit, or where the worker has ended.

        Raises:
            MalformedReply: The bytes are no reply.
        """
        try:
            async with asyncio.timeout(timeout_s):
                header = await self._reader.readexactly(LENGTH.size)
                length = length_of(header, max_bytes=MAX_FRAME_BYTES)
                body = await self._reader.readexactly(length)
        except MalformedFrame as error:
            raise MalformedReply(str(error)) from error
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return None
        return unpack_reply(body)

    def close(self) -> None:
        """Close this side of socket and pipe, opened or not."""
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._here.close()
        if self._output is not None:
            self._output.close()
        else:
            self._printed.close()


class BoundedOutput(asyncio.Protocol):
    """Passes on to stderr what a worker prints, at most `PRINTED_BYTES` in each window."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._window_ends = 0.0
        self._left = 0
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        """Pass on printed bytes (`asyncio.Protocol`)."""
        if self._clock() >= self._window_ends:
            self._report()
            self._left, self._window_ends = PRINTED_BYTES, self._clock() + PRINT_WINDOW_S
        passed = data[: self._left]
        self._left -= len(passed)
        self._dropped += len(data) - len(passed)
        with suppress(OSError):  # our own log is full: uvloop would close the worker's pipe
            os.write(2, passed)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - its signature
        """Report the bytes dropped last (`asyncio.Protocol`)."""
        self._report()

    def _report(self) -> None:
        if self._dropped:
            log.warning("the reward printed too much: bytes dropped", bytes=self._dropped)
        self._dropped = 0


async def start_worker(channel: Channel, *arguments: str) -> asyncio.subprocess.Process:
    """Start a worker on the other ends of a channel, which is closed if that fails.

    Args:
        channel: Channel that is not open yet; it is opened before the worker starts.
        arguments: Command line of the worker; the descriptor of its frames is added.

    Raises:
        OSError: The system has no process or descriptor left.
    """
    try:
        with channel.worker_ends() as (frames, prints):
            await channel.open()
            return await asyncio.create_subprocess_exec(
                *arguments,
                str(frames),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                pass_fds=(frames,),
                start_new_session=True,  # Ctrl-C is for the actor, which then ends this one
            )
    except BaseException:
        channel.close()
        raise
