"""A TCP proxy that lets only so many bytes through per second, in threads of its own."""

import socket
import threading
import time

from msgspec import structs

PIECE_BYTES = 16 * 1024


class SlowLink:
    """Listens on a free port; each connection goes on to `endpoint`, slowly towards the client."""

    def __init__(self, endpoint: str, *, bytes_per_s: float) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lead(self, publication):
        """The publication, at the near end of this link."""
        return structs.replace(
            publication, endpoint=f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        )

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
                target.sendall(piece)
                if is_slow:
                    time.sleep(len(piece) / self._bytes_per_s)
        except OSError:  # one end is gone
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._listener.close()
        for end in self._open:
            end.close()
