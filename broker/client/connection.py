"""A client's way to whichever broker answers: one DEALER, and what became of its connection.

Where a run has several brokers, or the broker's key is being exchanged, there are several ways in.
The connection begins at one that depends on the incarnation, so that actors spread, and goes to the
next when this one is silent, cut off or does not have the key that was expected.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from itertools import product

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from broker.transport.keys import KeyPair
from broker.transport.sockets import connect_dealer
from configs.errors import SettingsError

CUT_S = 1.0  # without a connection: some tries to connect anew to the same broker
SILENT_S = 5.0  # with one, beyond what the broker itself may take: it is stopped, or out of reach
MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

log = structlog.get_logger()
ReadKeys = Callable[[], Sequence[bytes]]
"""Reads the public keys that a broker of the run may have now."""


class Connection:
    """Connects in the background; used from one event loop.

    Args:
        endpoints: `tcp://host:port` of each broker.
        server_keys: Their public keys, z85; read again before the next way is taken.
        keys: The client's own pair.
        incarnation: Decides where to begin.
        max_message_bytes: Largest message that is taken.
        on_cut: Is called when what was on its way is lost.
        on_refused: Is called with the reason when a broker refuses the client's key, and with None
            when one lets it in.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        server_keys: ReadKeys,
        keys: KeyPair,
        incarnation: str,
        max_message_bytes: int,
        on_cut: Callable[[], None],
        on_refused: Callable[[str | None], None],
    ) -> None:
        first = zlib.crc32(incarnation.encode()) % len(endpoints)
        self._endpoints = (*endpoints[first:], *endpoints[:first])
        self._read_keys = server_keys
        self._on_cut = on_cut
        self._on_refused = on_refused
        self._way = (self._endpoints[0], server_keys()[0])
        self._turned_at = 0.0
        self._heard_at = 0.0
        self._context = zmq.asyncio.Context()
        self._socket = connect_dealer(
            self._context,
            self._way[0],
            keys=keys,
            server_key=self._way[1],
            max_message_bytes=max_message_bytes,
        )
        self._monitor = self._socket.get_monitor_socket(MONITORED | HANDSHAKE_FAILED)
        self.state = "no connection yet"
        """What became of the connection, in words."""

    @property
    def endpoint(self) -> str:
        """Where it connects to now."""
        return self._way[0]

    @property
    def heard_at(self) -> float:
        """When a message last came, `time.monotonic`."""
        return self._heard_at

    async def send(self, frame: bytes) -> None:
        """Hand a message over; `zmq.Again` if there is no connection to take it."""
        await self._socket.send(frame, flags=zmq.NOBLOCK, copy=False)

    async def receive(self) -> bytes:
        """Wait for the next message."""
        frames = await self._socket.recv_multipart()
        self._heard_at = time.monotonic()
        return frames[-1]

    def turn_if_silent(self, asked_at: float, patience_s: float) -> None:
        """Take the next way if a request of `asked_at` has waited too long on this one.

        Args:
            asked_at: When it was made, `time.monotonic`.
            patience_s: What the broker itself may take to answer.
        """
        limit_s = SILENT_S + patience_s if self.state == "connected" else CUT_S
        since = max(asked_at, self._heard_at, self._turned_at)
        if time.monotonic() - since > limit_s:
            self._turn()

    async def watch(self) -> None:
        """Follow what becomes of the connection, for ever."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._on_refused(
                    f"the broker at {self.endpoint} refused this key; put its .pub file into the "
                    "folder allowed/ of the broker's keys, or copy the run's actor.key here"
                )
            elif event & HANDSHAKE_FAILED:
                self.state = "the handshake failed: broker.pub is not the key of this broker"
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = "connected"
                self._on_refused(None)
            elif event == zmq.EVENT_DISCONNECTED:
                if self.state == "connected":
                    self.state = "the connection was cut"
                self._on_cut()  # send it again at once
            elif self.state == "no connection yet":
                self.state = "reached, but without a handshake"

    def close(self) -> None:
        """Drop the connection."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        self._turned_at = time.monotonic()
        try:
            ways = [
                (endpoint, key) for key, endpoint in product(self._read_keys(), self._endpoints)
            ]
        except SettingsError as error:
            log.warning("the broker's public key cannot be read", reason=str(error))
            return
        place = ways.index(self._way) if self._way in ways else -1
        way = ways[(place + 1) % len(ways)]
        if way == self._way:
            return
        log.info("trying another way to the broker", endpoint=way[0], reason=self.state)
        self._socket.disconnect(self._way[0])
        self._way = way
        self._socket.curve_serverkey = way[1]
        self._socket.connect(way[0])
        self.state = "no connection yet"
        self._on_cut()
