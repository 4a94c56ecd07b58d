"""The actor's end of the line to vLLM's first worker, in which its weight groups are joined.

    actor: listens ◀── connects when the engine has started ── worker
           Enter(epoch), Receive(path), Leave ──▶        ◀── OrderReply(digest | fault)

Consumes answers. Waits for the worker to connect; its end fails all orders that wait for an answer.
The caller sets deadlines: a worker that is stopped answers nothing.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import tempfile
from itertools import count
from pathlib import Path
from typing import TypeAlias

from msgspec import MsgspecError

from actors.engine.weights.worker_orders import (
    MAX_LINE_BYTES,
    Enter,
    Leave,
    Order,
    OrderReply,
    Receive,
    answer_of,
    line_of,
)
from broker.protocol.weight_messages import Epoch
from configs.errors import WeightsError
from configs.machine import folder_of_sockets

PREFIX, SOCKET = "nyala-line-", "worker"
NAME_BYTES = len(f"{PREFIX}12345678/{SOCKET}")
Ends: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WorkerLine:
    """A `MemberPlace` in another process; listens from the start."""

    def __init__(self) -> None:
        # Only this user may enter the folder, which is removed once the worker has connected.
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder_of_sockets(NAME_BYTES))
        self.path = str(Path(self._folder.name, SOCKET))
        """Path at which the worker connects."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[OrderReply]] = {}

    @property
    def is_open(self) -> bool:
        """Whether the worker is connected."""
        return self._writer is not None

    async def run(self) -> None:
        """Wait for the worker, and read its answers until it has ended.

        Orders that still wait for an answer then fail.
        """
        reason = "this actor ends"
        try:
            reader, self._writer = await self._connected()
            while answer := await reader.readline():
                self._on_answer(answer_of(answer))
            reason = "it has ended"
        except (OSError, ValueError, MsgspecError) as error:
            reason = str(error)
        finally:
            self._end(reason)

    async def enter(self, epoch: Epoch) -> None:
        """Let the worker prepare to be in this group, in place of any other.

        Raises:
            WeightsError: The worker cannot join, or has ended.
        """
        await self._execute_order(Enter(next(self._numbers), epoch))

    async def receive(self, path: Path, memory: mmap.mmap) -> str:
        """Let the worker fill the file; return its digest.

        Raises:
            WeightsError: The worker failed, or has ended: the bytes are a mixture.
        """
        answer = await self._execute_order(Receive(next(self._numbers), str(path), len(memory)))
        return answer.digest

    def leave_group(self) -> None:
        """Tell the worker to leave the group, without waiting for it."""
        self._send(Leave())

    async def _execute_order(self, order: Enter | Receive) -> OrderReply:
        answered: asyncio.Future[OrderReply] = asyncio.get_running_loop().create_future()
        self._waiting[order.number] = answered
        try:
            if not self._send(order):
                raise WeightsError("vLLM's worker must be there to join a weight group, got none")
            answer = await answered
        finally:
            self._waiting.pop(order.number, None)
        if answer.fault:
            raise WeightsError(answer.fault)
        return answer

    def _send(self, order: Order) -> bool:
        if self._writer is None:
            return False
        self._writer.write(line_of(order))
        return True

    def _on_answer(self, answer: OrderReply) -> None:
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _connected(self) -> Ends:
        connected: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()

        def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(
            on_connect, sock=self._listener, limit=MAX_LINE_BYTES
        )
        try:
            return await connected
        finally:
            server.close()
            self._folder.cleanup()

    def _end(self, reason: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WeightsError(f"vLLM's worker cannot receive: {reason}"))
