"""A network card of limited speed in front of a server: a TCP proxy whose connections share it.

Only what the server sends is slowed down and counted. Threads of its own, because a proxy on one
loop with what it serves would measure itself.
"""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType

PIECE_BYTES = 256 * 1024


class Uplink:
    """Listens on a free port of this machine and goes on to `endpoint` until closed.

    Args:
        endpoint: Of the server.
        bytes_per_s: Of all its connections together.
    """

    def __init__(self, endpoint: str, *, bytes_per_s: float) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._bytes_per_s = bytes_per_s
        self._wire = threading.Lock()
        self._free_at = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: list[socket.socket] = []
        self.num_bytes = 0
        """That the server has sent."""
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut all connections."""
        for end in (self._listener, *self._open):
            end.close()

    def __enter__(self) -> Uplink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        try:
            while piece := source.recv(PIECE_BYTES):
                if is_slow:
                    self._wait_for_the_wire(len(piece))
                target.sendall(piece)
        except OSError:  # one end is gone
            pass
        finally:
            target.close()

    def _wait_for_the_wire(self, num_bytes: int) -> None:
        with self._wire:
            self.num_bytes += num_bytes
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            pause_s = self._free_at - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
