"""The publisher's door: actors' messages in, news and slices of weights out.

Owns who is connected by which route. One task reads the socket and never waits for anything else,
so that pulls are answered while a broadcast is under way; another carries version after version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq.asyncio

from broker.protocol.manifest import SparseLink, chunk_digests
from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    Ack,
    Announce,
    Chunk,
    Fault,
    Join,
    Moved,
    Pull,
    Ready,
    Sources,
)
from broker.weights.object_store import WeightStore
from broker.weights.port import WeightPort
from buffer.record.episode import PolicyVersion
from configs.errors import RecordError

from .broadcast import Broadcast, BroadcastSettings
from .epochs import Membership, WeightEpochs
from .object_store_writer import Keyframes
from .pauses import Pauses
from .pull_tree import PullTree
from .slots import Slot, Slots
from .sparse_chain import SparseChain
from .versions_on_offer import Shelf


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one version."""

    version: PolicyVersion
    actors: int
    """Live actors when it was announced."""
    members: int
    """Of these, members of its weight epoch; the others pull."""
    epoch: int
    """Number of the weight epoch; 0 = none."""
    is_complete: bool
    """All members confirmed it."""
    wall_s: float
    """From its announcement to the last confirmation."""
    density: float = 1.0
    """Share of changed elements; 1 = not compared."""
    sparse_bytes: int = 0
    """Of its sparse update; 0 = there is none."""
    paused_s: float = 0.0
    """For which generation has stood still for swaps, over all actors of this publisher's life."""
    served_s: float = 0.0
    """For which those actors have had weights to serve."""


class WeightServer:
    """Serves sealed versions to actors until cancelled.

    Args:
        socket: A bound ROUTER.
        slots: Where the learner seals versions.
        run: Name of the run; messages of another are ignored.
        broadcast: How to send to groups; None = actors pull.
        store: Where versions are kept for those far away; None = nowhere.
        chain: Keeps sparse updates for those who pull; None = they pull all bytes.
        report: Is told what became of each version.
        allows: Says whether the holder of this public key may still speak; None = the socket's door
            has the last word.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        slots: Slots,
        *,
        run: str,
        broadcast: BroadcastSettings | None,
        store: WeightStore | None = None,
        chain: SparseChain | None = None,
        report: Callable[[Sent], None],
        allows: Callable[[str], bool] | None = None,
    ) -> None:
        self._port = WeightPort(socket, run=run, on_message=self._take, allows=allows)
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._chain = chain
        self._shelf = Shelf(slots, clock=self._clock)
        self._keyframes = Keyframes(store, self._shelf) if store is not None else None
        self._pauses = Pauses()
        self._tree = PullTree()
        self._digests: tuple[PolicyVersion, bytes] | None = None
        self._is_digesting = False
        self._routes: dict[str, bytes] = {}
        self._joins: dict[str, Join] = {}
        """What each actor said last."""
        self._woken = asyncio.Event()
        self._woken.set()  # a restarted publisher finds its version already sealed
        join_s, send_s = (broadcast.join_s, broadcast.send_s) if broadcast else (1.0, 1.0)
        self._epochs = WeightEpochs(join_s=join_s, send_s=send_s, clock=self._clock)
        self._broadcast: Broadcast | None = None
        if broadcast is not None:
            self._broadcast = Broadcast(
                broadcast,
                self._epochs,
                post=self._post,
                device_of=lambda actor: self._joins[actor].device,
            )

    def wake(self) -> None:
        """Say that there may be a newly sealed version."""
        self._woken.set()

    async def serve(self) -> None:
        """Read the socket and carry versions, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._port.read())
            tasks.create_task(self._carry())
            if self._keyframes is not None:
                tasks.create_task(self._keyframes.run())

    def _take(self, route: bytes, actor: str, message: object) -> None:
        self._routes[actor] = route
        match message:
            case Join():
                self._joined(actor, message)
            case Pull():
                self._pulled(actor, message)
            case Ready() | Ack() | Fault() if self._broadcast is not None:
                self._broadcast.heard(actor, message)
            case _:
                raise RecordError(f"an actor must not send {type(message).__name__}")

    def _joined(self, actor: str, join: Join) -> None:
        self._joins[actor] = join
        self._pauses.heard(actor, join)
        self._tree.heard(actor, join.share)
        self._epochs.heard(actor, can_group=join.can_group)
        current = self._shelf.current
        if current is None or join.version >= current.manifest.version:
            return
        epoch = self._epochs.open_epoch_of(actor)
        if epoch or not self._is_digesting:
            self._post_news(actor, current, epoch)

    def _pulled(self, actor: str, pull: Pull) -> None:
        if pull.base is None:
            payload = self._shelf.read(actor, pull)
        else:
            payload = self._chain.read(pull) if self._chain is not None else None
        if payload is not None:
            self._post(actor, Chunk(pull.version, pull.offset, payload, pull.base))
        elif (current := self._shelf.current) is not None:
            self._post(actor, Moved(current.manifest, pull.offset, *self._ways_of(actor, current)))

    def _post_news(self, actor: str, slot: Slot, epoch: int = 0) -> None:
        self._post(actor, Announce(slot.manifest, epoch, *self._ways_of(actor, slot)))

    def _ways_of(
        self, actor: str, slot: Slot
    ) -> tuple[tuple[SparseLink, ...], Sources | None, str]:
        """Return where this actor can have a version besides the publisher's bytes of it."""
        links = self._chain.links if self._chain is not None else ()
        return links, self._sources_of(actor, slot.manifest.version), str(slot.path)

    def _sources_of(self, actor: str, version: PolicyVersion) -> Sources | None:
        """Return whom this actor can ask before the publisher; None: nobody, or not yet."""
        if self._digests is None or self._digests[0] != version:
            return None
        way = self._tree.way_of(actor)
        url = self._keyframes.url_of(version) if self._keyframes is not None else ""
        return Sources(way, self._digests[1], url) if way or url else None

    async def _carry(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            slot = self._shelf.advance()
            if slot is not None:
                self._woken.set()  # a newer one may have been sealed meanwhile
                await self._announce(slot)

    async def _announce(self, slot: Slot) -> None:
        readers = {actor for actor, join in self._joins.items() if join.reads_memory}
        for actor in readers:  # all that they wait for
            self._post_news(actor, slot)
        change = None
        if self._chain is not None:
            change = await asyncio.to_thread(self._chain.advance, slot)
        started = self._clock()
        self._forget_silent()
        version, actors = slot.manifest.version, self._epochs.live()
        membership = self._broadcast.begin(version) if self._broadcast is not None else None
        members = membership.members if membership is not None else ()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._offer(slot, readers.union(members)))
            sending = tasks.create_task(self._send(slot, membership))
        wall_s = self._clock() - started
        epoch = membership.number if membership is not None else 0
        self._report(
            Sent(
                version=version,
                actors=len(actors),
                members=len(members),
                epoch=epoch,
                is_complete=sending.result(),
                wall_s=wall_s,
                density=change.density if change is not None else 1.0,
                sparse_bytes=change.num_bytes if change is not None else 0,
                paused_s=self._pauses.paused_s,
                served_s=self._pauses.served_s,
            )
        )

    async def _send(self, slot: Slot, membership: Membership | None) -> bool:
        """Take a version through its weight epoch. False: a member has not confirmed it."""
        if self._broadcast is None or membership is None:
            return True
        for actor in membership.members:
            self._post_news(actor, slot, membership.number)
        return await self._broadcast.run(slot, membership)

    async def _offer(self, slot: Slot, others: Collection[str]) -> None:
        """Announce a version to those who pull it: all but these, who have it another way."""
        pulling = set(self._epochs.live()).difference(others)
        if (pulling and not self._tree.is_flat) or self._keyframes is not None:
            self._is_digesting = True  # who joins meanwhile is told with the others
            digests = await asyncio.to_thread(chunk_digests, slot.memory, CHUNK_BYTES)
            self._digests, self._is_digesting = (slot.manifest.version, digests), False
        for actor in set(self._epochs.live()).difference(others):
            self._post_news(actor, slot)
        if self._keyframes is not None:
            self._keyframes.wake()

    def _forget_silent(self) -> None:
        self._epochs.forget_silent()
        live = set(self._epochs.live())
        self._pauses.forget_all_but(live)
        self._tree.forget_all_but(live)
        for table in (self._routes, self._joins):
            for actor in table.keys() - live:
                del table[actor]

    def _post(self, actor: str, message: object) -> None:
        """Send if the actor is there and reads. What matters is asked for again."""
        route = self._routes.get(actor)
        if route is not None:
            self._port.post(route, message)
