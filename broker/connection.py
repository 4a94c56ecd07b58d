"""Connection of a client to one of the run's brokers: one DEALER and the state of its handshake.

Where a run has several brokers, or the broker's key is being exchanged, there are several targets:
pairs of endpoint and public key. The connection begins at one that depends on the incarnation, so
that actors spread, and goes to the next when this one is silent, cut off or has another key.
Brokers that the run has now (`learn`) come before those in the settings, which may be gone.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import product

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from broker.transport.keys import KeyPair
from broker.transport.sockets import CONNECT_MS, HANDSHAKE_MS, connect_dealer
from configs.errors import SettingsError

CUT_S = 1.0  # without a connection: some tries to reconnect to the same broker
REACH_S = (CONNECT_MS + HANDSHAKE_MS) / 1000  # on the slowest line that is waited for
SLOW_S = 0.9 * HANDSHAKE_MS / 1000  # an unfinished handshake this old is ended for its age alone
SILENT_S = 5.0  # with a connection, beyond the broker's own time: it is stopped, or out of reach
UNANSWERED_S = 10.0  # a broker answers within milliseconds, one that starts within seconds
STILL_UNANSWERED_S = 60.0
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
        server_keys: Reads the brokers' public keys (z85) before each choice of a target.
        keys: The client's own pair.
        incarnation: Decides the first target.
        max_message_bytes: Largest message that is received.
        on_cut: Called when messages on their way are lost.
        on_refused: Called with the reason when a broker refuses the client's key, and with None
            when a broker accepts it.

    Raises:
        SettingsError: The brokers' public keys cannot be read.
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
        self._place = zlib.crc32(incarnation.encode())
        self._configured = self._endpoints = self._spread(endpoints)
        self._read_keys = server_keys
        self._on_cut = on_cut
        self._on_refused = on_refused
        self._target = (self._endpoints[0], server_keys()[0])
        self._switched_at = 0.0
        self._received_at = 0.0
        self._reached_at: float | None = None
        """Begin of the handshake that is under way."""
        self._patience_s = CUT_S
        self._is_connected, self._is_cut = asyncio.Event(), asyncio.Event()
        self._is_cut.set()
        self._context = zmq.asyncio.Context()
        self._socket = connect_dealer(
            self._context,
            self._target[0],
            keys=keys,
            server_key=self._target[1],
            max_message_bytes=max_message_bytes,
        )
        self._monitor = self._socket.get_monitor_socket(MONITORED | HANDSHAKE_FAILED)
        self.state = "no connection yet"
        """State of the connection, for log lines and errors."""

    @property
    def endpoint(self) -> str:
        """Broker of the current target."""
        return self._target[0]

    @property
    def description(self) -> str:
        """The broker of the current target, and the state of the connection to it."""
        return f"{self.endpoint} ({self.state})"

    @property
    def received_at(self) -> float:
        """Time of the last message, `time.monotonic`."""
        return self._received_at

    def learn(self, endpoints: Sequence[str]) -> None:
        """Remember the present endpoints of the run's brokers; an empty list changes nothing."""
        if endpoints:
            targets = (*self._spread(endpoints), *self._configured)
            self._endpoints = tuple(dict.fromkeys(targets))

    async def send(self, frame: bytes) -> None:
        """Send a message; raises `zmq.Again` at once if there is no connection to take it."""
        await self._socket.send(frame, flags=zmq.NOBLOCK, copy=False)

    async def receive(self) -> bytes:
        """Wait for the next message."""
        frames = await self._socket.recv_multipart()
        self._received_at = time.monotonic()
        return frames[-1]

    def switch_if_silent(self, asked_at: float, broker_wait_s: float) -> None:
        """Connect to the next target, if there is one, when a request has waited too long on this.

        Args:
            asked_at: Time of the request, `time.monotonic`.
            broker_wait_s: Time that the broker itself may take to answer.
        """
        if self.state == "connected":
            limit_s = SILENT_S + broker_wait_s
        else:
            limit_s = CUT_S if self._reached_at is None else self._patience_s
        since = max(asked_at, self._received_at, self._switched_at)
        if time.monotonic() - since > limit_s:
            self._switch()

    async def until_cut(self, for_s: float) -> None:
        """Return once `for_s` seconds have passed without a connection, counted from now on."""
        while True:
            await self._is_cut.wait()
            try:
                async with asyncio.timeout(for_s):
                    await self._is_connected.wait()
            except TimeoutError:
                return

    async def watch(self) -> None:
        """Follow the connection's state, and log a broker that never answers, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_state())
            tasks.create_task(self._report_silence())

    async def _report_silence(self) -> None:
        pause_s = UNANSWERED_S
        while not self._received_at:
            await asyncio.sleep(pause_s)
            pause_s = STILL_UNANSWERED_S
            if not self._received_at:
                log.warning("no answer from the broker yet", broker=self.description)

    async def _follow_state(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._on_refused(
                    f"the broker at {self.endpoint} refused this key; put its .pub file into the "
                    "folder allowed/ of the broker's keys, or copy the run's enrolment.key here"
                )
            elif event & HANDSHAKE_FAILED:
                self.state = self._why_no_handshake()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state, self._reached_at, self._patience_s = "connected", None, CUT_S
                self._is_cut.clear()
                self._is_connected.set()
                self._on_refused(None)
            elif event == zmq.EVENT_DISCONNECTED:
                self._reached_at = None
                if self.state == "connected":
                    self.state = "the connection was cut"
                self._cut()  # send it again at once
            else:
                self._reached_at = time.monotonic()
                if self.state == "no connection yet":
                    self.state = "reached, but without a handshake"

    def _why_no_handshake(self) -> str:
        """Return why a handshake failed: at its time limit, or because the broker ended it."""
        if self._reached_at is not None and time.monotonic() - self._reached_at >= SLOW_S:
            return (
                f"no handshake within {HANDSHAKE_MS / 1000:g} s: the line to the broker is slow, "
                "or the broker is stopped"
            )
        return "the broker ended the handshake: broker.pub may not be its key, or it is stopping"

    def close(self) -> None:
        """Drop the connection at once."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _spread(self, endpoints: Sequence[str]) -> tuple[str, ...]:
        """Rotate endpoints, so that actors begin with different brokers."""
        first = self._place % len(endpoints)
        return (*endpoints[first:], *endpoints[:first])

    def _switch(self) -> None:
        self._switched_at = time.monotonic()
        if self._reached_at is not None:  # the line may be slow: more time for each target
            self._patience_s = min(2 * self._patience_s, REACH_S)
        try:
            targets = [
                (endpoint, key) for key, endpoint in product(self._read_keys(), self._endpoints)
            ]
        except SettingsError as error:
            log.warning("the broker's public key cannot be read", reason=str(error))
            return
        position = targets.index(self._target) if self._target in targets else -1
        target = targets[(position + 1) % len(targets)]
        if target == self._target:
            return
        log.info("connecting to another broker or key", endpoint=target[0], reason=self.state)
        self._socket.disconnect(self._target[0])
        self._target, self._reached_at = target, None
        self._socket.curve_serverkey = target[1]
        self._socket.connect(target[0])
        self.state = "no connection yet"
        self._cut()

    def _cut(self) -> None:
        self._is_connected.clear()
        self._is_cut.set()
        self._on_cut()
