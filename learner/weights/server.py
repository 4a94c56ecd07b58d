"""The publisher's server: messages of actors in, announcements and slices of weights out.

Owns the routes of connected actors. One task reads the socket and never waits for anything else,
so that pulls are answered while a broadcast is under way; another delivers version after version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container

import structlog
import zmq.asyncio

from broker.protocol.manifest import SparseLink, WeightManifest
from broker.protocol.weight_messages import (
    JOIN_EVERY_S,
    Ack,
    Announce,
    Brokers,
    Join,
    Neighbours,
    Pull,
    Ready,
    Sources,
    VersionReplaced,
    WeightChunk,
    WeightGroupFault,
)
from broker.transport.allow_list import TAG
from broker.weights.port import Route, WeightPort
from configs.errors import RecordError

from .broadcast import Broadcast, BroadcastSettings
from .epochs import Membership, WeightEpochs
from .log import VersionDelivery
from .memory import WeightSlot, WeightSlots
from .pull import SliceDigests, VersionsOnOffer
from .sites import Sites, check_share
from .updates import SparseChain

TAKEN_AGAIN_S = 0.5

log = structlog.get_logger()


class WeightServer:
    """Serves sealed versions to actors until cancelled.

    Args:
        socket: A bound ROUTER.
        slots: Slots in which the learner seals versions.
        run: Name of the run; messages of another are ignored.
        broadcast: Deadlines and address of groups; None = actors pull.
        chain: Keeps sparse updates; None = versions travel whole.
        report: Receives the delivery of each version.
        allows: Returns whether the holder of this public key still has access; None = the check at
            connection is enough.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        slots: WeightSlots,
        *,
        run: str,
        broadcast: BroadcastSettings | None,
        chain: SparseChain | None = None,
        report: Callable[[VersionDelivery], None],
        allows: Callable[[str], bool] | None = None,
    ) -> None:
        self._port = WeightPort(socket, run=run, on_message=self._on_message, allows=allows)
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._chain = chain
        self._versions = VersionsOnOffer(slots, chain, clock=self._clock)
        self._pauses = Pauses()
        self._sites = Sites()
        self._told: dict[str, tuple[Route, Neighbours]] = {}
        """Actor that shares in a site -> the route and the neighbours that it was told last."""
        self._looked_at = self._clock()
        self._digests = SliceDigests()
        self._is_preparing = False
        """Whether updates or digests of the current version are still to come."""
        self._routes: dict[str, Route] = {}
        self._brokers = Brokers(())
        self._joins: dict[str, Join] = {}
        """The last JOIN of each actor."""
        self._woken = asyncio.Event()
        self._woken.set()  # a restarted publisher finds its version already sealed
        join_s, send_s = (broadcast.join_s, broadcast.send_s) if broadcast else (1.0, 1.0)
        self._epochs = WeightEpochs(join_s=join_s, send_s=send_s, clock=self._clock)
        self._broadcast: Broadcast | None = None
        if broadcast is not None:
            self._broadcast = Broadcast(
                broadcast, self._epochs, post=self._post, form_for=self._versions.form_for
            )

    def wake(self) -> None:
        """Notify the server that there may be a newly sealed version."""
        self._woken.set()

    def introduce(self, brokers: tuple[str, ...]) -> None:
        """Tell actors, also those that join later, where the brokers of the run are."""
        if brokers == self._brokers.endpoints:
            return
        self._brokers = Brokers(brokers)
        for actor in self._routes:
            self._post_brokers(actor)

    async def serve(self) -> None:
        """Read the socket and deliver versions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._port.read())
            tasks.create_task(self._deliver_all())
            tasks.create_task(self._digests.make_wanted(lambda: self._versions.current))

    def _on_message(self, route: Route, key: str, incarnation: str, message: object) -> None:
        # As at the broker: whoever uses another's name under its own key only speaks for itself.
        actor = f"{incarnation} ({key[:TAG]})"
        self._routes[actor] = route
        match message:
            case Join():
                self._on_join(actor, key, message)
            case Pull():
                self._on_pull(actor, message)
            case Ready() | Ack() | WeightGroupFault() if self._broadcast is not None:
                self._broadcast.on_answer(actor, message)
            case _:
                raise RecordError(
                    f"an actor must send JOIN, PULL or an answer to a broadcast, got "
                    f"{type(message).__name__}; run actors and learner with one release of Nyala"
                )

    def _on_join(self, actor: str, key: str, join: Join) -> None:
        if join.share is not None:
            check_share(join.share, key)
        self._joins[actor] = join
        self._pauses.on_join(actor, join)
        self._post_brokers(actor)
        self._epochs.on_join(
            actor, can_group=join.can_group, device=join.device, version=join.version
        )
        if self._introduce_to_site(actor, key, join):
            return
        current = self._versions.current
        if current is None or join.version >= current.manifest.version:
            return
        epoch = self._epochs.open_epoch_of(actor)
        if self._is_preparing and not epoch:
            return
        has_peers = self._sites.has(actor) and bool(self._sites.way_of(actor))
        if has_peers and self._digests.digests_of(current.manifest.version) is None:
            self._digests.want()  # its next JOIN brings the news; now it would pull from here
        else:
            self._post_news(actor, current, epoch)

    def _introduce_to_site(self, actor: str, key: str, join: Join) -> bool:
        """Tell an actor's site about it; True = the actor gets the news only with its next JOIN.

        By then its peers know its key. Before that they would refuse it, and it would fetch its
        first version from the publisher.
        """
        if self._clock() - self._looked_at >= JOIN_EVERY_S:
            self._looked_at = self._clock()
            self._sites.forget_all_but(set(self._epochs.live()))
        is_new = self._sites.on_join(actor, key, join)
        sharing = self._sites.sharing_with(actor)
        for neighbour in sharing if is_new else {actor}.intersection(sharing):
            self._post_neighbours(neighbour)
        return is_new and bool(self._sites.way_of(actor))

    def _post_neighbours(self, actor: str) -> None:
        route = self._routes.get(actor)
        if route is None:
            return
        told = (route, self._sites.neighbours_of(actor))
        if self._told.get(actor) != told and self._port.post(*told):
            self._told[actor] = told

    def _on_pull(self, actor: str, pull: Pull) -> None:
        payload = self._versions.read(actor, pull)
        if payload is not None:
            self._post(actor, WeightChunk(pull.version, pull.offset, payload, pull.base))
        elif (current := self._versions.current) is not None:
            self._post(
                actor,
                VersionReplaced(current.manifest, pull.offset, *self._alternatives(actor, current)),
            )

    def _post_brokers(self, actor: str) -> None:
        if self._brokers.endpoints:
            self._post(actor, self._brokers)

    def _post_news(self, actor: str, slot: WeightSlot, epoch: int = 0) -> None:
        self._post(actor, Announce(slot.manifest, epoch, *self._alternatives(actor, slot)))

    def _alternatives(
        self, actor: str, slot: WeightSlot
    ) -> tuple[tuple[SparseLink, ...], Sources | None, str, bytes]:
        """Alternative sources of this version for this actor."""
        updates = self._chain.updates if self._chain is not None else ()
        links = tuple(update.link for update in updates)
        digests = [update.slice_digests for update in updates if self._sites.has(actor)]
        return links, self._sources_of(actor, slot.manifest), str(slot.path), b"".join(digests)

    def _sources_of(self, actor: str, manifest: WeightManifest) -> Sources | None:
        """Return the sources that this actor asks before the publisher; None = none, or not yet."""
        digests = self._digests.digests_of(manifest.version)
        if digests is None:
            return None
        way = self._sites.way_of(actor)
        return Sources(way, digests) if way else None

    async def _deliver_all(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                slot = self._versions.advance()
            except OSError as error:  # connections have taken all files that may be open
                log.warning("no more files can be opened at the moment", reason=str(error))
                await asyncio.sleep(TAKEN_AGAIN_S)
                self._woken.set()
                continue
            if slot is not None:
                self._woken.set()  # a newer one may have been sealed meanwhile
                await self._announce(slot)

    async def _announce(self, slot: WeightSlot) -> None:
        readers = {actor for actor, join in self._joins.items() if join.reads_memory}
        for actor in readers:  # they wait for nothing else
            self._post_news(actor, slot)
        change = None
        self._is_preparing = True  # an actor that joins meanwhile gets it with the others
        if self._chain is not None:
            change = await asyncio.to_thread(self._chain.advance, slot)
        started = self._clock()
        self._forget_silent()
        version, actors = slot.manifest.version, self._epochs.live()
        membership = (
            self._broadcast.freeze_members(version) if self._broadcast is not None else None
        )
        members = membership.members if membership is not None else ()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._offer(slot, readers.union(members)))
            sending = tasks.create_task(self._send(slot, membership))
        wall_s = self._clock() - started
        epoch = membership.number if membership is not None else 0
        self._report(
            VersionDelivery(
                version=version,
                actors=len(actors),
                members=len(members),
                epoch=epoch,
                is_complete=sending.result(),
                wall_s=wall_s,
                member_bytes=self._broadcast.num_bytes if self._broadcast and membership else 0,
                density=change.density if change is not None else 1.0,
                sparse_bytes=change.num_bytes if change is not None else 0,
                adapter_bytes=len(slot.adapter),
                paused_s=self._pauses.paused_s,
                served_s=self._pauses.served_s,
            )
        )

    async def _send(self, slot: WeightSlot, membership: Membership | None) -> bool:
        """Deliver a version by its weight epoch. False: a member has not confirmed it."""
        if self._broadcast is None or membership is None:
            return True
        for actor in membership.members:
            self._post_news(actor, slot, membership.number)
        return await self._broadcast.run(slot, membership)

    async def _offer(self, slot: WeightSlot, others: Collection[str]) -> None:
        """Announce a version to the actors that pull it: all but `others`."""
        pulling = set(self._epochs.live()).difference(others)
        if pulling and not self._sites.is_flat:
            await self._digests.make(slot)
        self._is_preparing = False
        for actor in set(self._epochs.live()).difference(others):
            self._post_news(actor, slot)

    def _forget_silent(self) -> None:
        self._epochs.forget_silent()
        live = set(self._epochs.live())
        self._pauses.forget_all_but(live)
        self._sites.forget_all_but(live)
        for table in (self._routes, self._joins, self._told):
            for actor in table.keys() - live:
                del table[actor]

    def _post(self, actor: str, message: object) -> None:
        """Send a message if the actor is there and reads. Actors repeat requests that matter."""
        route = self._routes.get(actor)
        if route is not None:
            self._port.post(route, message)


# --------------------------------------------------------------------------------------------------
# Time for which generation has paused for swaps, as actors say with each JOIN.


class Pauses:
    """Time for which generation has paused for swaps, over all actors of this publisher's life.

    Each JOIN carries both totals of its incarnation; the difference to its last JOIN is added.
    """

    def __init__(self) -> None:
        self._last: dict[str, Join] = {}
        self.paused_s = 0.0
        """Seconds paused for swaps."""
        self.served_s = 0.0
        """Seconds with weights to serve, pauses included."""

    def on_join(self, actor: str, join: Join) -> None:
        """Add the time that has passed since this actor's last JOIN."""
        last = self._last.get(actor)
        if last is not None:
            self.paused_s += max(join.paused_s - last.paused_s, 0.0)
            self.served_s += max(join.served_s - last.served_s, 0.0)
        self._last[actor] = join

    def forget_all_but(self, live: Container[str]) -> None:
        """Drop silent actors; their times stay counted."""
        self._last = {actor: join for actor, join in self._last.items() if actor in live}
