"""ZeroMQ sockets of the project, with every option that a default would get wrong; endpoints.

One ROUTER per server, one DEALER per client and server, request and reply with explicit numbers.
No PUB and no PUSH: both drop messages silently. Works with `zmq.Context` and `zmq.asyncio.Context`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TypeVar

import zmq

from configs.errors import SettingsError

from .keys import KeyPair
from .zap import DOMAIN

# --------------------------------------------------------------------------------------------------
# Addresses of servers as other machines reach them.


def reachable(endpoint: str) -> str:
    """Return the endpoint by which other machines reach a server.

    `0.0.0.0` and `::` become the IPv4 source address of outward packets; no other address changes.

    Args:
        endpoint: Endpoint on which the server listens, with a numeric address.

    Raises:
        SettingsError: The address is one of these, and the machine has no default route.
    """
    host, port = host_and_port(endpoint)
    if ipaddress.ip_address(host).is_unspecified:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
                outward.connect(("192.0.2.1", 9))  # for documentation; connecting sends nothing
                host = outward.getsockname()[0]
        except OSError as error:
            raise SettingsError(
                f"a server at {endpoint} must have a default route to find its own address, got: "
                f"{error}; listen at an address of this machine instead or, for a broker or the "
                f"learner, name the one by which others reach it (broker.advertise, "
                f"learner.advertise)"
            ) from error
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def advertised(endpoint: str, address: str) -> str:
    """Return an endpoint under another host, or host and port.

    Args:
        endpoint: Endpoint on which the server listens.
        address: `host` or `host:port`, IPv6 in brackets.
    """
    host, _, port = address.rpartition(":")
    if not host or port.endswith("]"):
        host, port = address, str(host_and_port(endpoint)[1])
    return f"tcp://{host}:{port}"


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an endpoint into host and port."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


# --------------------------------------------------------------------------------------------------
# ZeroMQ sockets of the project, with every option that a default would get wrong.

SEND_HWM = 64  # twice what one client keeps in flight: a full queue is a peer that does not read
RECEIVE_HWM = 64  # as above; memory is bounded by this times peers times message size
BACKLOG = 1024  # a fleet that reconnects at once after a restart
HANDSHAKE_MS = 15_000  # three round trips at 2 s a way; a peer without a key by then is cut
HEARTBEAT_MS = 2_000  # finds a peer whose machine vanished: TCP alone would wait for hours
HEARTBEAT_TIMEOUT_MS = 6_000  # three beats
RECONNECT_MS = 200
RECONNECT_MAX_MS = 2_000  # bounds how long a broker that is back waits for its actors
CONNECT_MS = 5_000  # then the server's name is resolved anew: it may have moved
STALLED_MS = 10_000  # a peer that takes no bytes for this long is cut (Linux)
SERVER_LINGER_MS = 2_000  # last replies of a server that drains; clients resend in any case

Socket = TypeVar("Socket", bound=zmq.Socket)  # type: ignore[type-arg]  # sync or asyncio


def bind_router(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    keys: KeyPair,
    max_message_bytes: int,
    send_hwm: int = SEND_HWM,
    receive_hwm: int = RECEIVE_HWM,
    silence_ms: int = HEARTBEAT_TIMEOUT_MS,
) -> Socket:
    """Make a server socket that only keys let in by the context's `ZapAuthenticator` can reach.

    A connection is given up `silence_ms` after its last complete message. A message must cross a
    slow link in less, because heartbeats wait behind it. On Linux, a connection is given up sooner
    if sent bytes are not confirmed.

    A reply to a peer that is gone, or that does not read, raises `zmq.ZMQError` (EHOSTUNREACH) or
    `zmq.Again` instead of vanishing; send with NOBLOCK.

    Raises:
        SettingsError: The endpoint cannot be listened on.
    """
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no entry
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A second peer under the same routing id is ignored, never handed the first one's replies.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, send_hwm)
    socket.setsockopt(zmq.RCVHWM, receive_hwm)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.TCP_MAXRT, STALLED_MS)
    socket.setsockopt(zmq.LINGER, SERVER_LINGER_MS)
    _keep_alive(socket, silence_ms)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise SettingsError(
            f"{endpoint} must be an address this process can listen on, got: "
            f"{zmq.strerror(error.errno or 0)}; give an address of this machine, or 0.0.0.0 for "
            "all of them, and a port that no other process holds"
        ) from None
    return socket


def connect_dealer(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    keys: KeyPair,
    server_key: bytes,
    max_message_bytes: int,
    receive_hwm: int = RECEIVE_HWM,
    may_queue: bool = False,
    silence_ms: int = HEARTBEAT_TIMEOUT_MS,
) -> Socket:
    """Make a client socket, which connects and reconnects in the background.

    Send with NOBLOCK: without a connection `zmq.Again` is raised at once, so that no old message
    goes to the next server. With `may_queue` messages wait for the connection, up to `SEND_HWM`.

    Raises:
        zmq.ZMQError: The endpoint is no address, or a key is none.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.RCVHWM, receive_hwm)
        socket.setsockopt(zmq.IMMEDIATE, 0 if may_queue else 1)
        socket.setsockopt(zmq.LINGER, 0)  # important messages are resent until acknowledged
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.TCP_MAXRT, STALLED_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        _keep_alive(socket, silence_ms)
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)  # a name that is no address, or no key
        raise
    return socket


def bound_endpoint(socket: zmq.Socket) -> str:  # type: ignore[type-arg]
    """Return the address that a server socket listens on, with the port that the system chose."""
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def _keep_alive(socket: zmq.Socket, silence_ms: int) -> None:  # type: ignore[type-arg]
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, silence_ms)


# --------------------------------------------------------------------------------------------------
# A ROUTER on an event loop: a message that has arrived is read at once, a reply sent at once.
#
# `zmq.asyncio` makes a future for every call and polls the socket several times around it, which
# took a fifth of the broker's time for small messages. Here a future is made only to wait.


class Router:
    """Reads and writes a bound ROUTER, for one reading task of the running loop.

    Args:
        socket: Socket, not of `zmq.asyncio`; any other user of it calls `wake_reader` afterwards.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._descriptor = socket.fileno()
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether `receive` waits, and has read all that arrived."""
        return self._arrival is not None and not self._arrival.done()

    async def receive(self) -> list[zmq.Frame]:
        """Return the frames of the next message; does not yield to other tasks if one is there."""
        while True:
            try:
                return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._wait()

    def send(self, route: bytes, frame: bytes) -> None:
        """Queue a message for a peer.

        Raises:
            zmq.ZMQError: The peer is gone (EHOSTUNREACH), or its queue is full (EAGAIN).
        """
        try:
            self.socket.send_multipart((route, frame), zmq.NOBLOCK)
        finally:
            self.wake_reader()

    def wake_reader(self) -> None:
        """Let `receive` try again: any call of the socket may consume the sign of an arrival."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _wait(self) -> None:
        self._arrival = self._loop.create_future()
        # Only during the wait: ZeroMQ's descriptor stays readable until the socket is used.
        self._loop.add_reader(self._descriptor, self.wake_reader)
        try:
            await self._arrival
        finally:
            self._loop.remove_reader(self._descriptor)
            self._arrival = None
