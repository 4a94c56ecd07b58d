"""Tree of pulls, so that a version leaves the publisher a few times and not once per actor.

    publisher ──▶ 0 ──▶ 2, 3          actors that share, in the order of their JOINs
              ──▶ 1 ──▶ 4, 5 ...      then actors that only pull

Each passes every slice on as it arrives, so that the last has a version little later than the
first. Pure: each actor gets its way to the publisher, and goes along it when a peer fails.

A tree with one root, as a site has, sends a version once. Its second actor is the deputy: all
others ask it when the first fails, and the publisher only after both, so that even then the version
comes once more and not once for each of them.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from broker.protocol.weight_messages import Peer

FAN_OUT = 2
"""Actors that pull from one source: an uplink is shared by two, and 100 actors are six deep."""
DEPUTY = 1


class PullTree:
    """Places of live actors.

    Args:
        roots: Actors that pull from the publisher.
    """

    def __init__(self, roots: int = FAN_OUT) -> None:
        self._roots = roots
        self._shares: dict[str, Peer | None] = {}
        self._peers: list[Peer] = []
        self._places: dict[str, int] = {}

    @property
    def is_flat(self) -> bool:
        """True if no actor shares, so that all pull from the publisher."""
        return not self._peers

    @property
    def sharing(self) -> list[str]:
        """Actors that share, in the order of their JOINs."""
        return [actor for actor, share in self._shares.items() if share is not None]

    def on_join(self, actor: str, share: Peer | None) -> None:
        """Note the address at which an actor shares its weights, or that it does not."""
        if actor not in self._shares or self._shares[actor] != share:
            self._shares[actor] = share
            self._arrange()

    def forget_all_but(self, actors: AbstractSet[str]) -> None:
        """Drop silent actors; those after them move up."""
        if gone := self._shares.keys() - actors:
            self._shares = {a: share for a, share in self._shares.items() if a not in gone}
            self._arrange()

    def way_of(self, actor: str) -> tuple[Peer, ...]:
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
