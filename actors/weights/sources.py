"""Sources of slices in the order of the settings: other actors, the publisher.

Slices from peers are checked one by one. A peer that sent a wrong slice is never asked again, and a
silent peer is not asked for a while; the missing slices come from the next source.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, Protocol

import structlog
import zmq.asyncio

from broker.protocol.weight_messages import (
    PeerEndpoint,
    SlicePending,
    VersionGone,
    VersionReplaced,
    WeightChunk,
)

from .links import ActorIdentity, WeightLink

log = structlog.get_logger()

REST_S = 30.0
"""Time in which a silent peer is not asked again: it may be unreachable from here."""

Kind = Literal["memory", "peers", "publisher"]
"""Kind of a source, as in `actors.pull_from`."""
Answer = WeightChunk | VersionReplaced | SlicePending | VersionGone
Post = Callable[[object], bool]
OnAnswer = Callable[[Answer], None]


class NoAddressError(Exception):
    """The address that a peer has sent cannot be connected to."""


class PullSource(Protocol):
    """A process that answers pulls."""

    @property
    def name(self) -> str:
        """Name of the source in logs."""
        ...

    @property
    def kind(self) -> Kind:
        """Kind of the source; only the publisher's slices are not checked one by one."""
        ...

    def open(self, on_answer: OnAnswer) -> AbstractAsyncContextManager[Post]:
        """Connect, and return the function that sends requests; answers go to `on_answer`.

        Raises:
            NoAddressError: The address of a peer cannot be connected to.
        """
        ...


class PublisherSource:
    """The publisher; its answers come over a permanent link, not to `on_answer`."""

    name = "publisher"
    kind: Kind = "publisher"

    def __init__(self, post: Post) -> None:
        self._post = post

    @asynccontextmanager
    async def open(self, on_answer: OnAnswer) -> AsyncIterator[Post]:  # noqa: ARG002 - as every source
        """Return the function that sends requests."""
        yield self._post


class PeerSource:
    """An actor that shares its weights."""

    kind: Kind = "peers"

    def __init__(
        self, peer: PeerEndpoint, context: zmq.asyncio.Context, caller: ActorIdentity
    ) -> None:
        self.name = peer.endpoint
        self.peer = peer
        self._context = context
        self._caller = caller

    @asynccontextmanager
    async def open(self, on_answer: OnAnswer) -> AsyncIterator[Post]:
        """Connect for as long as the block runs; raises as `PullSource.open`."""

        def on_message(message: object) -> None:
            # Only a publisher may send VersionReplaced.
            if isinstance(message, WeightChunk | SlicePending | VersionGone):
                on_answer(message)

        try:
            link = WeightLink(
                self._context, self.peer, caller=self._caller, on_message=on_message, may_queue=True
            )
        except zmq.ZMQError as error:
            raise NoAddressError(f"its address cannot be connected to: {error}") from error
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(link.read())
                yield link.post
                reading.cancel()
        finally:
            link.close()


class WeightSources:
    """Chooses the sources of each pull, and remembers those that failed.

    Args:
        post: Sends a message to the publisher; may lose it.
        order: Kinds of sources, in order of preference.
        caller: Identity of this actor at its peers.
    """

    def __init__(self, post: Post, *, order: Sequence[Kind], caller: ActorIdentity) -> None:
        self._publisher = PublisherSource(post)
        self._order = order
        self._caller = caller
        self._context: zmq.asyncio.Context | None = None
        self._resting: dict[PeerEndpoint, float] = {}

    @property
    def has_memory(self) -> bool:
        """Whether the settings list the publisher's memory."""
        return "memory" in self._order

    def choose_sources(self, peers: Sequence[PeerEndpoint] = ()) -> tuple[PullSource, ...]:
        """Return the sources of a version or an update, in order; peers that failed are left out.

        Args:
            peers: Actors that may have it, nearest first.
        """
        sources: list[PullSource] = []
        for kind in self._order:
            if kind == "publisher":
                sources.append(self._publisher)
            elif kind == "peers":
                sources += self._peers(peers)
        return tuple(sources)

    def _peers(self, peers: Sequence[PeerEndpoint]) -> Iterator[PeerSource]:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        now = time.monotonic()
        self._resting = {peer: until for peer, until in self._resting.items() if until > now}
        for peer in peers:
            if peer not in self._resting:
                yield PeerSource(peer, self._context, self._caller)

    def failed(self, source: PullSource, reason: str, has_lied: bool) -> None:
        """Avoid this source, if it is a peer: for a while, or for good if it sent wrong bytes."""
        log.warning("source of weights left", source=source.name, reason=reason)
        if isinstance(source, PeerSource):
            rest_s = math.inf if has_lied else REST_S * random.uniform(0.5, 1.5)
            self._resting[source.peer] = time.monotonic() + rest_s

    def close(self) -> None:
        """End all connections to peers."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
