"""Who may connect: the ZAP door of a ZeroMQ context, an allow-list of CURVE public keys.

One daemon thread answers libzmq's authentication requests for every server socket of its context,
so the same class serves an asyncio broker and a publisher that runs in a plain thread. It fails
closed: the sockets demand an answer from this door (`sockets.bind_router`), so without it nobody
gets in.

Example:
    with Door(context, keys_folder):
        router = bind_router(context, endpoint, ...)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog
import zmq
from zmq.utils import z85

from configs.worker import Worker

from .allow_list import AllowList, Role

DOMAIN = b"nyala"
"""ZAP domain of every server socket; without one libzmq would not ask at all."""
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the ZAP standard, RFC 27
POLL_MS = 200  # bounds how long `close` waits for the thread; requests do not wait for it

log = structlog.get_logger()


class Door:
    """Answers ZAP requests of one context until closed.

    Args:
        context: Whose server sockets it guards.
        keys: Folder of the run's keys.
        roles: Who may connect here.
        on_refused: Is told the address of each peer that is turned away, from the door's thread.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: Path,
        *,
        roles: Collection[Role] = tuple(Role),
        on_refused: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self.allowed = AllowList(keys)
        """Shared with a server that also checks the key of every message (revocation)."""
        self._roles = frozenset(roles)
        self._on_refused = on_refused
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(context)
        self._stop = threading.Event()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._worker = Worker(self._serve, name="zap")

    def __enter__(self) -> Door:
        """Start answering; bind server sockets after this."""
        self._socket.bind(ZAP_ENDPOINT)
        self._worker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def check(self) -> None:
        """Raise what ended the thread; without it every new peer is refused. Call now and then."""
        self._worker.check()

    def close(self) -> None:
        """Stop answering, so that no new peer gets in; raises what ended the thread before."""
        self._stop.set()
        self._worker.join()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(POLL_MS):
                    self._socket.send_multipart(self._judge(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _judge(self, request: list[bytes]) -> list[bytes]:
        """Answer one request; whatever is wrong with it, the next ones are answered too."""
        try:
            return self._answer(request)
        except Exception:  # the edge of the loop: without its thread nobody would get in again
            log.exception("peer refused: its request could not be judged")
            version, request_id = (*request, b"", b"")[:2]
            return [version, request_id, b"500", b"internal error", b"", b""]

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Judge [version, id, domain, address, identity, mechanism, credentials...]."""
        version, request_id, domain, address, _identity, mechanism, *credentials = request
        member, key = None, b""
        if domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1:
            self.allowed.refresh()
            key = z85.encode(credentials[0])
            member = self.allowed.member(key)
        if member is None or member.role not in self._roles:
            log.debug("peer refused: its key may not connect here", mechanism=str(mechanism))
            self._on_refused(address.decode(errors="replace"))
            return [version, request_id, b"400", b"key not allowed", b"", b""]
        return [version, request_id, b"200", b"OK", key, b""]
