"""ZAP authentication of a ZeroMQ context against an allow-list of CURVE public keys.

One thread answers libzmq's authentication requests for every server socket of its context, so the
same class serves the broker, the weight publisher and actors that share weights. It fails closed:
the sockets demand an answer (`sockets.bind_router`), so without this thread no peer gets in.

Consumes ZAP requests; waits for the next, at most `POLL_MS`; `close` ends it. Its owner calls
`check_zap_thread` at intervals.

Example:
    with ZapAuthenticator(context, keys_folder) as authenticator:
        router = bind_router(context, endpoint, ...)
        ...
        authenticator.check_zap_thread()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import structlog
import zmq
from zmq.utils import z85

from configs.worker import Worker

from .allow_list import AllowList, Role

DOMAIN = b"nyala"
"""ZAP domain of every server socket; without one libzmq would not authenticate at all."""
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the ZAP standard, RFC 27
POLL_MS = 200  # bounds how long `close` waits for the thread; requests do not wait for it

log = structlog.get_logger()


class ZapAuthenticator:
    """Answers ZAP requests of one context until closed.

    Args:
        context: Context whose server sockets are protected.
        keys: Folder of the run's keys, or an allow-list.
        roles: Roles of the keys that may connect.
        on_refused: Called in the thread with the address of each refused peer.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: Path | AllowList,
        *,
        roles: Collection[Role] = tuple(Role),
        on_refused: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self.allowed = keys if isinstance(keys, AllowList) else AllowList(keys)
        """The allow-list, shared with a server that checks the key of every message."""
        self._is_short = False
        self._roles = frozenset(roles)
        self._on_refused = on_refused
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(context)
        self._stop = threading.Event()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._worker = Worker(self._serve, name="zap")

    def __enter__(self) -> ZapAuthenticator:
        """Start answering; bind server sockets after this."""
        self._socket.bind(ZAP_ENDPOINT)
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_zap_thread(self) -> None:
        """Raise the exception that ended the thread, if any: without it no peer can connect."""
        self._worker.raise_if_failed()

    def refresh(self) -> None:
        """Read the allow-list again, for servers that check the key of every message by it.

        No connection is cut here. While this process can open no more files, the list stays as it
        is, and that is logged once. Raises errors of the thread, as `check_zap_thread`.
        """
        try:
            self.allowed.refresh()
            self._is_short = False
        except OSError as error:
            if not self._is_short:
                log.warning("no more files can be opened at the moment", reason=str(error))
            self._is_short = True
        self.check_zap_thread()

    def close(self) -> None:
        """Stop answering, so that no new peer gets in; waits for the thread, at most `POLL_MS`.

        Raises errors of the thread, as `check_zap_thread`.
        """
        self._stop.set()
        self._worker.join()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(POLL_MS):
                    self._socket.send_multipart(self._safe_answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _safe_answer(self, request: list[bytes]) -> list[bytes]:
        """Answer one request; a malformed request is refused and does not end the thread."""
        try:
            return self._answer(request)
        except Exception:  # the edge of the loop: without its thread no peer would get in again
            log.exception("peer refused: its authentication request failed")
            version, request_id = (*request, b"", b"")[:2]
            return [version, request_id, b"500", b"internal error", b"", b""]

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Answer [version, id, domain, address, identity, mechanism, credentials...]."""
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
