"""Sites: places whose actors fetch each version once over the link between them and the publisher.

    publisher ──link──▶ first of "eu" ──▶ the others of "eu"      a tree of its own for each site
              ──link──▶ first of "us" ──▶ ...
              ──▶ actors of no site, in a tree as ever

The first is the actor of the site that has shared for longest. Each actor names its site with JOIN;
those that share are told which keys they may answer: those of their site.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

from broker.protocol.weight_messages import Join, Neighbours, Peer
from configs.errors import RecordError, quoted

from .pull_tree import PullTree

NOWHERE = ""
"""Site of actors that have none."""
ADDRESS = re.compile(r"tcp://\S{1,260}:\d{1,5}")
"""With the longest name that a host can have."""


class Sites:
    """Places of live actors, site by site."""

    def __init__(self) -> None:
        self._trees: dict[str, PullTree] = {NOWHERE: PullTree()}
        self._site_of: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._neighbours: dict[str, Neighbours] = {}
        """By site; made when first asked for, and again after each change."""

    @property
    def is_flat(self) -> bool:
        """True if no actor shares, so that all pull from the publisher."""
        return all(tree.is_flat for tree in self._trees.values())

    def on_join(self, actor: str, key: str, join: Join) -> bool:
        """Note a JOIN; returns whether those of its site have yet to hear of it."""
        is_new = actor not in self._site_of
        site = self._site_of.setdefault(actor, join.site)  # of an incarnation for good
        self._keys[actor] = key
        self._trees.setdefault(site, PullTree(roots=1)).on_join(actor, join.share)
        if is_new:
            self._neighbours.pop(site, None)
        return is_new and site != NOWHERE

    def forget_all_but(self, actors: AbstractSet[str]) -> None:
        """Drop silent actors; those after them move up."""
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

    def way_of(self, actor: str) -> tuple[Peer, ...]:
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


def check_share(share: Peer, key: str) -> None:
    """Check that others could connect there, who are told what this actor says.

    Args:
        share: From its JOIN.
        key: Of the connection that JOIN came over.

    Raises:
        RecordError: They could not.
    """
    if share.public_key != key:
        raise RecordError("an actor must share under the key of its connection, got another")
    if not ADDRESS.fullmatch(share.endpoint):
        raise RecordError(f"an actor must share at tcp://host:port, got {quoted(share.endpoint)}")
