"""Sites, whose actors fetch each version once over the link to the publisher, by trees of pulls.

    publisher ──link──▶ first of "eu" ──▶ the others of "eu"      a tree of its own for each site
              ──link──▶ first of "us" ──▶ ...
              ──▶ actors of no site, in a tree as ever

The first is the actor of the site that has shared for longest. Each actor names its site with JOIN;
those that share are told which keys they may answer: those of their site.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

from broker.protocol.weight_messages import Join, Neighbours, PeerEndpoint
from configs.errors import RecordError, quoted

# --------------------------------------------------------------------------------------------------
# Sites: places whose actors fetch each version once over the link between them and the publisher.

NOWHERE = ""
"""Site of actors that name none."""
ADDRESS = re.compile(r"tcp://\S{1,260}:\d{1,5}")
"""Address of an actor; a host's name has 255 characters at most."""


class Sites:
    """The live actors of each site, in trees of pulls."""

    def __init__(self) -> None:
        self._trees: dict[str, PullTree] = {NOWHERE: PullTree()}
        self._site_of: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._neighbours: dict[str, Neighbours] = {}
        """Site -> neighbours; made on the first request, and again after each change."""

    @property
    def is_flat(self) -> bool:
        """True if no actor shares, so that all pull from the publisher."""
        return all(tree.is_flat for tree in self._trees.values())

    def on_join(self, actor: str, key: str, join: Join) -> bool:
        """Note a JOIN; return whether its site does not know the actor yet."""
        is_new = actor not in self._site_of
        site = self._site_of.setdefault(actor, join.site)  # of an incarnation for good
        self._keys[actor] = key
        self._trees.setdefault(site, PullTree(roots=1)).on_join(actor, join.share)
        if is_new:
            self._neighbours.pop(site, None)
        return is_new and site != NOWHERE

    def forget_all_but(self, actors: AbstractSet[str]) -> None:
        """Drop silent actors; the actors behind them in the tree move up."""
        gone = self._site_of.keys() - actors
        for actor in gone:
            del self._site_of[actor], self._keys[actor]
        if gone:
            left = {NOWHERE, *self._site_of.values()}
            self._trees = {site: tree for site, tree in self._trees.items() if site in left}
            self._neighbours.clear()
        for tree in self._trees.values():
            tree.forget_all_but(actors)

    def has(self, actor: str) -> bool:
        """Return whether an actor has a site."""
        return self._site_of.get(actor, NOWHERE) != NOWHERE

    def way_of(self, actor: str) -> tuple[PeerEndpoint, ...]:
        """Return the peers that an actor asks, nearest first; empty = the publisher alone."""
        return self._trees[self._site_of.get(actor, NOWHERE)].way_of(actor)

    def sharing_with(self, actor: str) -> list[str]:
        """Return the actors of its site that share, itself among them; none without a site."""
        return self._trees[self._site_of[actor]].sharing if self.has(actor) else []

    def neighbours_of(self, actor: str) -> Neighbours:
        """Return the keys of the actors of its site; the same object until they change."""
        site = self._site_of[actor]
        if site not in self._neighbours:
            keys = {self._keys[other] for other, its in self._site_of.items() if its == site}
            self._neighbours[site] = Neighbours(tuple(sorted(keys)))
        return self._neighbours[site]


def check_share(share: PeerEndpoint, key: str) -> None:
    """Check the address that an actor offers to others, before they are told of it.

    Args:
        share: Address and key from the actor's JOIN.
        key: Key of the connection over which JOIN came.

    Raises:
        RecordError: The key is another one, or the address is none.
    """
    if share.public_key != key:
        raise RecordError(
            "an actor must share under the key of its connection, got another; run actors and "
            "learner with one release of Nyala"
        )
    if not ADDRESS.fullmatch(share.endpoint):
        raise RecordError(
            f"an actor must share at tcp://host:port, got {quoted(share.endpoint)}; set "
            "actors.share_endpoint of that actor to such an address"
        )


# --------------------------------------------------------------------------------------------------
# Tree of pulls, so that a version leaves the publisher a few times and not once per actor.
#
#   publisher ──▶ 0 ──▶ 2, 3          actors that share, in the order of their JOINs
#             ──▶ 1 ──▶ 4, 5 ...      then actors that only pull
#
# Each passes every slice on as it arrives, so that the last has a version little later than the
# first. Pure: each actor gets its way to the publisher, and goes along it when a peer fails.
#
# A tree with one root, as a site has, sends a version once. Its second actor is the deputy: all
# others ask it when the first fails, and the publisher only after both, so that even then the
# version comes once more and not once for each of them.

FAN_OUT = 2
"""Actors that pull from one source: an uplink is shared by two, and 100 actors are six deep."""
DEPUTY = 1


class PullTree:
    """The tree of live actors by which they pull from one another.

    Args:
        roots: Actors that pull from the publisher.
    """

    def __init__(self, roots: int = FAN_OUT) -> None:
        self._roots = roots
        self._shares: dict[str, PeerEndpoint | None] = {}
        self._peers: list[PeerEndpoint] = []
        self._places: dict[str, int] = {}

    @property
    def is_flat(self) -> bool:
        """True if no actor shares, so that all pull from the publisher."""
        return not self._peers

    @property
    def sharing(self) -> list[str]:
        """Actors that share, in the order of their JOINs."""
        return [actor for actor, share in self._shares.items() if share is not None]

    def on_join(self, actor: str, share: PeerEndpoint | None) -> None:
        """Note the address at which an actor shares its weights, or that it does not."""
        if actor not in self._shares or self._shares[actor] != share:
            self._shares[actor] = share
            self._arrange()

    def forget_all_but(self, actors: AbstractSet[str]) -> None:
        """Drop silent actors; the actors behind them in the tree move up."""
        if gone := self._shares.keys() - actors:
            self._shares = {a: share for a, share in self._shares.items() if a not in gone}
            self._arrange()

    def way_of(self, actor: str) -> tuple[PeerEndpoint, ...]:
        """Return the peers that an actor asks, nearest first; empty = the publisher alone."""
        if self.is_flat:
            return ()
        places, place = [], self._places.get(actor, len(self._places))
        is_deputy = place == DEPUTY
        while place >= self._roots:
            place = (place - self._roots) // FAN_OUT % len(self._peers)
            places.append(place)
        has_deputy = self._roots == 1 and len(self._peers) > DEPUTY and not is_deputy
        if places and has_deputy and DEPUTY not in places:
            places.append(DEPUTY)
        return tuple(self._peers[place] for place in places)

    def _arrange(self) -> None:
        self._peers = [share for share in self._shares.values() if share is not None]
        order = sorted(self._shares, key=lambda actor: self._shares[actor] is None)  # stable
        self._places = {actor: place for place, actor in enumerate(order)}
