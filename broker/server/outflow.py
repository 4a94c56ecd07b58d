"""How much a broker sends to one peer: a bound on the large replies that wait for a slow reader.

ZeroMQ bounds the queue of a peer by messages, not by bytes, and a lease that continues an episode
may be as large as a message can be. Nobody says when a reply has left the queue, but the system
cuts a peer that takes nothing for `sockets.STALLED_MS`; so what one may be sent within that time
bounds what can wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

from broker.transport.sockets import STALLED_MS

SMALL_BYTES = 16 * 1024  # verdicts and refusals: ZeroMQ's own limit holds 64 of them to 1 MiB
WINDOW_S = STALLED_MS / 1000


class Outflow:
    """Counts bytes of large replies by peer, in windows of time.

    Args:
        max_peer_bytes: For one peer in one window. One reply of any size always fits.
        clock: Seconds.
    """

    def __init__(self, *, max_peer_bytes: int, clock: Callable[[], float]) -> None:
        self._max_peer_bytes = max_peer_bytes
        self._clock = clock
        self._ends_at = 0.0
        self._sent: dict[bytes, int] = {}

    def allows(self, peer: bytes, num_bytes: int) -> bool:
        """Count a reply; False if this peer has to read first."""
        if num_bytes <= SMALL_BYTES:
            return True
        now = self._clock()
        if now >= self._ends_at:
            self._ends_at = now + WINDOW_S
            self._sent.clear()
        sent = self._sent.get(peer, 0)
        if sent and sent + num_bytes > self._max_peer_bytes:
            return False
        self._sent[peer] = sent + num_bytes
        return True
