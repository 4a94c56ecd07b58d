"""Messages of the weight plane, between an actor's receiver and the weight publisher.

Each actor keeps one connection to the publisher. It sends JOIN every `JOIN_EVERY_S`; the publisher
sends the announcement of a version (ANNOUNCE), an invitation to receive it by a process group
(EPOCH, SEND, ABORT), or the bytes themselves (CHUNK). `codec.py` turns these structs into bytes,
one frame each.

    actor                         publisher
    Join          ──────────────▶             every 2 s: silent for 6 s = no member
                  ◀────────────── Announce    a version is there: epoch 0 = pull it, else wait
                  ◀────────────── Epoch       membership is frozen: rank, size, the store's address
    Ready         ──────────────▶             able, with that at hand; none blocks before all are
                  ◀────────────── Send        enter the group and receive all bytes, or updates
    Ack | WeightGroupFault  ────▶             bytes staged, digest equal | not received
                  ◀────────────── Abort       leave the group, pull instead
    Pull          ──────────────▶             at most `PULL_CREDIT` outstanding
                  ◀────────────── WeightChunk or VersionReplaced: it is gone, take a newer one
                  ◀────────────── Brokers     where brokers are, to each Join and at each change
                  ◀────────────── Neighbours  to who shares in a site: keys of those it may answer

An actor that shares its weights listens too. It gets PULL as the publisher does; it answers with
CHUNK, with LATER if it does not have that slice yet (it sends it when it has), or with GONE.
"""

from __future__ import annotations

from typing import TypeAlias

from buffer.record.episode import PolicyVersion

from .fields import Endpoints, Many, MessagePart, Real, Text, Whole, WireMessage
from .manifest import SparseLink, WeightManifest

JOIN_EVERY_S = 2.0
"""Pause between two JOINs."""
SILENT_AFTER_S = 6.0
"""Three JOINs missed: an actor that is merely slow sends the next one in time."""
CHUNK_BYTES = 4 * 2**20
"""Largest chunk of a pull: beyond 1 MiB CURVE's cost for each message no longer shows."""
PULL_CREDIT = 4
"""Chunks a puller may have outstanding: hides the round trip, bounds what one actor can queue."""
BUCKETS_IN_FLIGHT = 4
"""Buckets of a broadcast at a time: one travels, one is digested, and the next are prepared."""
MAX_WEIGHTS_FRAME = 2 * CHUNK_BYTES
"""A chunk and its header; also a manifest of 20 000 tensors."""


class PeerEndpoint(MessagePart, frozen=True):
    """Port at which an actor shares its weights. Producer: that actor. Consumer: its peers."""

    endpoint: Text
    public_key: Text
    """Its CURVE key (z85)."""


class Sources(MessagePart, frozen=True):
    """Sources of a version besides the publisher. Producer: publisher. Consumer: actors."""

    peers: Many[PeerEndpoint]
    """Nearest first: each but the last pulls from the next one."""
    digests: bytes
    """Digests of the version's slices of `CHUNK_BYTES`, in order (`manifest.chunk_digests`), by
    which each slice of another source is checked before it is kept or passed on."""


class Join(WireMessage, frozen=True, tag="weights.join", omit_defaults=True):
    """Actor -> publisher: this incarnation lives and serves `version`."""

    version: PolicyVersion
    can_group: bool
    """False: the actor is not invited; it pulls (another network), or reads the publisher's memory.
    """
    device: Text
    """`cpu` or `cuda`: a group uses NCCL only if all its members can."""
    paused_s: Real = 0.0
    """Time for which generation has paused for swaps, in this incarnation."""
    served_s: Real = 0.0
    """Time since its first version was served."""
    share: PeerEndpoint | None = None
    """Port at which the actor shares its weights; None = it does not share."""
    reads_memory: bool = False
    """The actor needs only the announcement: it reads the bytes from the publisher's memory."""
    site: Text = ""
    """Site whose actors fetch each version once between them; empty = no site."""


class Announce(WireMessage, frozen=True, tag="weights.announce", omit_defaults=True):
    """Publisher -> actor: these are the newest weights."""

    manifest: WeightManifest
    epoch: Whole
    """Weight epoch that will bring the version; 0 = pull."""
    links: Many[SparseLink] = ()
    """Updates that lead to the version from older ones, in order."""
    sources: Sources | None = None
    """None = the publisher alone."""
    memory: Text = ""
    """File in shared memory with the version's bytes, for actors of the publisher's machine."""
    update_digests: bytes = b""
    """Digests of the slices of all `links`, in order, by which actors of a site check updates from
    peers; empty = updates come from the publisher alone."""


class Epoch(WireMessage, frozen=True, tag="weights.epoch"):
    """Publisher -> member: version `version` comes over this group."""

    number: Whole
    """Increases with each new membership. The same number again = the group is reused."""
    version: PolicyVersion
    fresh: bool
    """True: build the group. False: use the group of this number, or answer FAULT."""
    backend: Text
    """`gloo` or `nccl`."""
    host: Text
    port: Whole
    """Address of the store of a fresh group."""
    rank: Whole
    size: Whole
    bucket_bytes: Whole
    """The wire bytes travel in slices of this size, the last one shorter."""
    join_s: Real
    """Longest time until all members have joined a fresh group, seconds."""
    send_s: Real
    """Longest time until all bytes have arrived, seconds."""


class Ready(WireMessage, frozen=True, tag="weights.ready"):
    """Member -> publisher: will enter the group at SEND."""

    epoch: Whole
    version: PolicyVersion
    held: PolicyVersion | None = None
    """Version that the member has, from which sparse updates can begin; None = no version."""
    base: Text = ""
    """Digest of the member's base of adapters; empty = it has none."""


class Send(WireMessage, frozen=True, tag="weights.send"):
    """Publisher -> member: all are ready; enter the group now."""

    epoch: Whole
    version: PolicyVersion
    links: Many[SparseLink] = ()
    """Sparse updates that travel one after the other in place of all bytes, or, from `BASE`, the
    adapter. A member applies those since its own version."""
    has_base: bool = False
    """All bytes of `BASE` travel before the adapter."""


class Ack(WireMessage, frozen=True, tag="weights.ack"):
    """Member -> publisher: the bytes are staged and have this digest. They are applied later."""

    epoch: Whole
    version: PolicyVersion
    digest: Text


class WeightGroupFault(WireMessage, frozen=True, tag="weights.fault"):
    """Member -> publisher: the group failed here; it must not be used again."""

    epoch: Whole
    version: PolicyVersion
    reason: Text


class Abort(WireMessage, frozen=True, tag="weights.abort"):
    """Publisher -> member, out of band: give the group up and pull."""

    epoch: Whole
    version: PolicyVersion
    reason: Text


class Pull(WireMessage, frozen=True, tag="weights.pull"):
    """Actor -> publisher or peer: send this slice of this version, or of an update to it.

    The version may be `BASE`, of which the publisher has all bytes.
    """

    version: PolicyVersion
    offset: Whole
    num_bytes: Whole
    base: PolicyVersion | None = None
    """Base of the sparse update, or `BASE` for the adapter; None = all bytes of the version. Peers
    have no adapters, and updates only for actors of their site."""

    def within(self, num_bytes: int) -> slice | None:
        """Return the slice of a version of this length, at most `CHUNK_BYTES`; None if outside."""
        if not 0 <= self.offset < num_bytes or self.num_bytes < 1:
            return None
        return slice(self.offset, min(self.offset + min(self.num_bytes, CHUNK_BYTES), num_bytes))


class WeightChunk(WireMessage, frozen=True, tag="weights.chunk"):
    """Publisher or peer -> actor: the slice of a pull."""

    version: PolicyVersion
    offset: Whole
    payload: bytes
    base: PolicyVersion | None = None
    """Base of the update, from the pull."""


class VersionReplaced(WireMessage, frozen=True, tag="weights.moved", omit_defaults=True):
    """Publisher -> actor, instead of a chunk: that version is gone; this is the newest."""

    manifest: WeightManifest
    offset: Whole
    """Offset of the pull that it answers."""
    links: Many[SparseLink] = ()
    """Updates that lead to the newest version from older ones, in order."""
    sources: Sources | None = None
    """None = the publisher alone."""
    memory: Text = ""
    """File in shared memory with its bytes, for actors of the publisher's machine."""
    update_digests: bytes = b""
    """Digests of slices of updates, as in ANNOUNCE."""


class Brokers(WireMessage, frozen=True, tag="weights.brokers"):
    """Publisher -> actor: brokers of the run answer here now.

    An actor whose only broker ended learns the address of the next one in this way, as it learns
    the address of another publisher from its broker.
    """

    endpoints: Endpoints


class Neighbours(WireMessage, frozen=True, tag="weights.neighbours"):
    """Publisher -> actor that shares in a site: who may pull from it, in answer to each JOIN."""

    keys: Many[Text]
    """Public CURVE keys (z85) of the live actors of its site, its own among them."""


class SlicePending(WireMessage, frozen=True, tag="weights.later"):
    """Peer -> actor: that slice is not here yet, and will be sent when it is."""

    version: PolicyVersion
    offset: Whole


class VersionGone(WireMessage, frozen=True, tag="weights.gone"):
    """Peer -> actor: that version is no longer here."""

    version: PolicyVersion
    offset: Whole


WeightMessage: TypeAlias = (
    Join
    | Announce
    | Epoch
    | Ready
    | Send
    | Ack
    | WeightGroupFault
    | Abort
    | Pull
    | WeightChunk
    | VersionReplaced
    | Brokers
    | Neighbours
    | SlicePending
    | VersionGone
)
