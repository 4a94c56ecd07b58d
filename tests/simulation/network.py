"""Sockets in memory between actors and brokers, and the faults of the network between them.

Stand-ins for the few methods of a ZeroMQ DEALER and ROUTER that the client and the server of the
broker use. Worse than ZeroMQ over TCP: single messages get lost, arrive twice, late, or out of
order. A killed process sends nothing; a stopped one still receives into its queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from tests.simulation.event_loop import OUTSIDE, Process, VirtualLoop, current_process

RECONNECT_S = 0.1


@dataclass
class Weather:
    """How bad the network is; all zero is a good day."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    """Share of messages that take up to `late_s` more, and so overtake each other."""
    late_s: float = 4.0
    delay_s: float = 0.002


class Trace:
    """A running hash of everything that happened: equal for equal seeds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hash = hashlib.blake2b(digest_size=16)
        self.length = 0

    def note(self, *facts: object) -> None:
        """Add an event."""
        self.length += 1
        self._hash.update(b"%.9f" % self._clock())
        for fact in facts:
            self._hash.update(fact if isinstance(fact, bytes) else repr(fact).encode())

    def digest(self) -> str:
        return self._hash.hexdigest()


class Mailbox:
    """What arrived and was not read; one reader."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._reader: asyncio.Future[Any] | None = None

    def put(self, item: Any) -> None:
        self._waiting.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    async def get(self) -> Any:
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()


@dataclass(frozen=True)
class Frame:
    """A received frame, with the key that the peer has proved to hold."""

    bytes: bytes
    key: str

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.bytes)

    def get(self, _name: str) -> str:
        return self.key


class Router:
    """A broker's socket while its process lives."""

    def __init__(self, network: Network, endpoint: str, owner: Process) -> None:
        self._network = network
        self.endpoint, self.owner = endpoint, owner
        self.inbox = Mailbox()

    @property
    def is_idle(self) -> bool:
        return self.inbox.is_empty

    async def receive(self) -> list[Frame]:
        route, frame = await self.inbox.get()
        key = route.decode()  # each actor has its own
        return [Frame(route, key), Frame(frame, key)]

    def send(self, route: bytes, frame: bytes) -> None:
        if not self._network.reply(self, route, frame):
            raise zmq.ZMQError(zmq.EHOSTUNREACH)


class Dealer:
    """An actor's socket."""

    def __init__(self, network: Network, endpoint: str, owner: Process, route: bytes) -> None:
        self._network = network
        self.endpoint, self.owner, self.route = endpoint, owner, route
        self.inbox = Mailbox()
        self.events = Mailbox()
        self.is_connected = False

    async def send(self, frame: bytes, flags: int = 0, *, copy: bool) -> None:
        if not self._network.send(self, frame):
            raise zmq.Again

    async def recv_multipart(self) -> list[bytes]:
        return [await self.inbox.get()]

    def disconnect(self, _endpoint: str) -> None:
        """Leave this broker; what it still sends is lost, or not."""
        self.is_connected = False

    def connect(self, endpoint: str) -> None:
        """Go to another broker."""
        self.endpoint = endpoint
        self._network.approach(self)

    def get_monitor_socket(self, _events: int) -> Monitor:
        return Monitor(self.events)

    def disable_monitor(self) -> None:
        self._network.close(self)

    def notify(self, event: int) -> None:
        """Report an event of the connection to the client's monitor."""
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.events.put([struct.pack("=hi", event, 0), self.endpoint.encode()])


@dataclass
class Monitor:
    """The client's monitor of its connection."""

    events: Mailbox

    async def recv_multipart(self) -> list[bytes]:
        return list(await self.events.get())


@dataclass(eq=False)
class Network:
    """All connections."""

    loop: VirtualLoop
    rng: random.Random
    trace: Trace
    weather: Weather = field(default_factory=Weather)
    routers: dict[str, Router] = field(default_factory=dict)
    dealers: dict[bytes, Dealer] = field(default_factory=dict)
    cut: dict[Process, float] = field(default_factory=dict)
    """Partitioned actors and when they are back."""
    count: dict[str, int] = field(
        default_factory=lambda: {"messages": 0, "lost": 0, "doubled": 0, "late": 0, "cut": 0}
    )
    _number: int = 0

    def dial(self, _context: Any, endpoint: str, **_options: Any) -> Dealer:
        """Make an actor's socket; what the client is given for `connect_dealer`."""
        owner = current_process()
        assert owner is not None, "sockets belong to processes"
        self._number += 1
        # A name as long for all that says what its owner is: a host of agents, or an actor.
        kind = b"host" if owner.name.startswith("host") else b"0000"
        dealer = Dealer(self, endpoint, owner, kind + b"%04d" % self._number)
        self.dealers[dealer.route] = dealer
        self.approach(dealer)
        return dealer

    def approach(self, dealer: Dealer) -> None:
        """Connect a moment later, if a broker listens there."""
        self._later(RECONNECT_S, self._connect, dealer)

    def bind(self, endpoint: str, owner: Process) -> Router:
        """Begin to listen; actors find out soon."""
        router = self.routers[endpoint] = Router(self, endpoint, owner)
        for dealer in self.dealers.values():
            if dealer.endpoint == endpoint:
                self._later(self.rng.uniform(1, 5) * RECONNECT_S, self._connect, dealer)
        return router

    def unbind(self, endpoint: str) -> None:
        """The broker's process is gone, and the kernel reports it to its peers."""
        del self.routers[endpoint]
        for dealer in list(self.dealers.values()):
            if dealer.endpoint == endpoint and dealer.is_connected:
                dealer.is_connected = False
                self._later(0.01, dealer.notify, zmq.EVENT_DISCONNECTED)

    def close(self, dealer: Dealer) -> None:
        """The actor's process has ended, and the kernel reports it to the broker."""
        self.dealers.pop(dealer.route, None)

    def close_all(self, owner: Process, *, vanished: bool) -> None:
        """An actor was killed: its sockets are closed, unless its whole machine vanished."""
        for dealer in [dealer for dealer in self.dealers.values() if dealer.owner is owner]:
            self._later(60.0 if vanished else 0.05, self.close, dealer)

    def send(self, dealer: Dealer, frame: bytes) -> bool:
        """Send to the broker; False while there is no connection."""
        if not dealer.owner.is_alive:
            return True
        router = self.routers.get(dealer.endpoint)
        if router is None or not dealer.is_connected:
            return False
        self._carry(dealer, router.inbox, [dealer.route, frame], frame)
        return True

    def reply(self, router: Router, route: bytes, frame: bytes) -> bool:
        """Send to an actor; False if it is known to be gone."""
        dealer = self.dealers.get(route)
        if dealer is None or not dealer.is_connected:
            return False
        if router.owner.is_alive:
            self._carry(dealer, dealer.inbox, frame, frame)
        return True

    def _carry(self, dealer: Dealer, inbox: Mailbox, item: Any, frame: bytes) -> None:
        weather, rng = self.weather, self.rng
        self.count["messages"] += 1
        self.trace.note(dealer.route, frame)
        if self.cut.get(dealer.owner, 0.0) > self.loop.time():
            self.count["cut"] += 1
            return
        copies = 1
        if weather.lost and rng.random() < weather.lost:
            self.count["lost"] += 1
            copies = 0
        elif weather.doubled and rng.random() < weather.doubled:
            self.count["doubled"] += 1
            copies = 2
        for _ in range(copies):
            delay_s = weather.delay_s * rng.uniform(0.5, 1.5)
            if weather.late and rng.random() < weather.late:
                self.count["late"] += 1
                delay_s += rng.uniform(0, weather.late_s)
            self._later(delay_s, inbox.put, item)

    def _connect(self, dealer: Dealer) -> None:
        if dealer.endpoint in self.routers and not dealer.is_connected:
            dealer.notify(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _later(self, delay_s: float, action: Callable[..., object], *arguments: object) -> None:
        self.loop.call_later(delay_s, action, *arguments, context=OUTSIDE)
