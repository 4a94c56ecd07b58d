"""Who pulls from whom, so that a version leaves the publisher a few times and not once per actor.

    publisher ──▶ 0 ──▶ 2, 3          those that share, in the order in which they came
              ──▶ 1 ──▶ 4, 5 ...      then those that only take

Each passes every slice on as it arrives, so that the last has a version little later than the
first. Pure: actors are told their way to the publisher, and go along it when a peer fails.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from broker.protocol.weight_messages import Peer

FAN_OUT = 2
"""Actors that pull from one source: an uplink is shared by two, and 100 actors are six deep."""


class PullTree:
    """Places of live actors."""

    def __init__(self) -> None:
        self._shares: dict[str, Peer | None] = {}
        self._peers: list[Peer] = []
        self._places: dict[str, int] = {}

    @property
    def is_flat(self) -> bool:
        """Whether nobody shares, so that all pull from the publisher."""
        return not self._peers

    def heard(self, actor: str, share: Peer | None) -> None:
        """Note where an actor shares its weights, or that it does not."""
        if actor not in self._shares or self._shares[actor] != share:
            self._shares[actor] = share
            self._arrange()

    def forget_all_but(self, actors: AbstractSet[str]) -> None:
        """Drop who is silent; those after them move up."""
        if gone := self._shares.keys() - actors:
            self._shares = {a: share for a, share in self._shares.items() if a not in gone}
            self._arrange()

    def way_of(self, actor: str) -> tuple[Peer, ...]:
        """Return whom it asks, nearest first; empty = the publisher alone."""
        if self.is_flat:
            return ()
        way, place = [], self._places.get(actor, len(self._places))
        while place >= FAN_OUT:
            place = (place - FAN_OUT) // FAN_OUT % len(self._peers)
            way.append(self._peers[place])
        return tuple(way)

    def _arrange(self) -> None:
        self._peers = [share for share in self._shares.values() if share is not None]
        order = sorted(self._shares, key=lambda actor: self._shares[actor] is None)  # stable
        self._places = {actor: place for place, actor in enumerate(order)}
