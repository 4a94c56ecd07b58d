"""The worker's end of the line to its actor: a member of weight groups inside vLLM's worker.

One thread reads orders and never waits for a group, so that an order to leave is followed at once;
groups have threads of their own. Orders by vLLM's calls would wait for the engine's steps, and the
steps for the orders. When the actor ends, its line closes, and the group is left.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from concurrent.futures import Future

from configs.errors import WeightsError
from configs.worker import Worker

from .member_thread import MemberThread
from .worker_orders import MAX_LINE_BYTES, Enter, Leave, OrderReply, Receive, line_of, order_of


class WorkerMember:
    """Follows the orders that come through a socket.

    Args:
        line: Socket that is connected to the actor.
        device: Device of the worker.
    """

    def __init__(self, line: socket.socket, device: str) -> None:
        self._line = line
        self._member = MemberThread(device)
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the actor closes the line."""
        with self._line, self._line.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                match order_of(line):
                    case Enter() as order:
                        self._enter(order)
                    case Receive() as order:
                        self._receive(order)
                    case Leave():
                        self._member.leave_group()
            self._member.leave_group()

    def _enter(self, order: Enter) -> None:
        try:
            self._member.enter(order.epoch)
        except WeightsError as error:
            self._answer(OrderReply(order.number, fault=str(error)))
        else:
            self._answer(OrderReply(order.number))

    def _receive(self, order: Receive) -> None:
        def on_done(arriving: Future[str]) -> None:
            error = arriving.exception()
            if error is None:
                self._answer(OrderReply(order.number, digest=arriving.result()))
            else:
                self._answer(
                    OrderReply(order.number, fault=f"the broadcast failed: {error}"[:1000])
                )

        try:
            memory = _map(order.path, order.num_bytes)
            arriving = self._member.receive(memory)
        except (OSError, ValueError, WeightsError) as error:
            self._answer(OrderReply(order.number, fault=str(error)))
        else:
            arriving.add_done_callback(on_done)

    def _answer(self, answer: OrderReply) -> None:
        try:
            with self._sending:
                self._line.sendall(line_of(answer))
        except OSError:  # the actor has gone; the reading end sees it too
            return


def serve_actor(path: str, device: str) -> Worker:
    """Connect to the actor that listens at this path, and serve it in a thread.

    Raises:
        OSError: Nobody listens there.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(path)
    return Worker(WorkerMember(line, device).run, name="weights-line").start()


def _map(path: str, num_bytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
