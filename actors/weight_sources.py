"""Where an actor can pull weights from, in order: actors that share them, then the publisher.

What a peer sends is checked slice by slice. One that lied is never asked again, one that was silent
not for a while; what it would have sent comes from the next source.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import structlog
import zmq.asyncio

from broker.weights import Chunk, Gone, Later, Moved, Peer, Sources

from .weight_link import Caller, WeightLink

log = structlog.get_logger()

REST_S = 30.0
"""For which a silent peer is not asked: it may be out of reach from here for ever."""

Answer = Chunk | Moved | Later | Gone
Post = Callable[[object], bool]
Take = Callable[[Answer], None]


class Source(Protocol):
    """Somebody who answers pulls."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def is_peer(self) -> bool:
        """Whether what it sends is checked slice by slice."""
        ...

    def open(self, take: Take) -> AbstractAsyncContextManager[Post]:
        """Connect: gives what sends requests; answers go to `take`."""
        ...


class PublisherSource:
    """The publisher. Its answers come over a link that is always there, not to `take`."""

    name = "publisher"
    is_peer = False

    def __init__(self, post: Post) -> None:
        self._post = post

    @asynccontextmanager
    async def open(self, take: Take) -> AsyncIterator[Post]:  # noqa: ARG002 - as every source
        """Give what sends requests."""
        yield self._post


class PeerSource:
    """An actor that shares its weights."""

    is_peer = True

    def __init__(self, peer: Peer, context: zmq.asyncio.Context, caller: Caller) -> None:
        self.name = peer.endpoint
        self.peer = peer
        self._context = context
        self._caller = caller

    @asynccontextmanager
    async def open(self, take: Take) -> AsyncIterator[Post]:
        """Connect for as long as it lasts."""

        def take_answer(message: object) -> None:
            if isinstance(message, Chunk | Later | Gone):  # what is newest, only a publisher says
                take(message)

        link = WeightLink(
            self._context, self.peer, caller=self._caller, take=take_answer, may_queue=True
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(link.read())
                yield link.post
                reading.cancel()
        finally:
            link.close()


class WeightSources:
    """Chooses the sources of each pull, and remembers who failed.

    Args:
        post: Sends a message to the publisher; may lose it.
        caller: As whom peers are asked; None = they are not.
    """

    def __init__(self, post: Post, *, caller: Caller | None = None) -> None:
        self._publisher = PublisherSource(post)
        self._caller = caller
        self._context: zmq.asyncio.Context | None = None
        self._resting: dict[Peer, float] = {}

    def of(self, offered: Sources | None) -> tuple[Source, ...]:
        """Return whom to ask, first one first; the publisher is the last."""
        if offered is None or self._caller is None:
            return (self._publisher,)
        if self._context is None:
            self._context = zmq.asyncio.Context()
        now = time.monotonic()
        self._resting = {peer: until for peer, until in self._resting.items() if until > now}
        peers = (peer for peer in offered.peers if peer not in self._resting)
        made = (PeerSource(peer, self._context, self._caller) for peer in peers)
        return (*made, self._publisher)

    def failed(self, source: Source, reason: str, has_lied: bool) -> None:
        """Do not ask this one, if it is a peer, for a while or ever again."""
        log.warning("source of weights left", source=source.name, reason=reason)
        if isinstance(source, PeerSource):
            rest_s = math.inf if has_lied else REST_S * random.uniform(0.5, 1.5)
            self._resting[source.peer] = time.monotonic() + rest_s

    def close(self) -> None:
        """End all connections to peers."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
