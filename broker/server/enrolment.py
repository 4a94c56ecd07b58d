"""Enrolment of actors: a key that many share registers a key of its own for each of them.

Keeps one holder of an enrolment key from filling the table of actors or the broker's disk: keys are
registered at a bounded rate and up to `broker.max_actors_per_enrolment` at a time. A key counts as
used while its actor is served here; unused ones are removed.
"""

from __future__ import annotations

from collections.abc import Callable

from broker.protocol.messages import Receipt, Refusal
from broker.transport.allow_list import Member
from broker.transport.enrolled import EnrolledKeys

from .audit import Audit
from .liveness import Liveness

BURST = 32  # actors that start together
PER_S = 2.0  # beyond that: an actor loads its model for longer than it waits here

BUSY = Refusal("busy", "keys are registered one after the other; send the same again")


class Enrolment:
    """Registers keys for the holders of enrolment keys.

    Args:
        keys: Where registered keys are kept.
        limit: What bounds their number, as errors name it.
        peers: Table of actors: their keys are in use.
        audit: Records keys that are removed.
        clock: Seconds.
    """

    def __init__(
        self,
        keys: EnrolledKeys,
        *,
        limit: str,
        peers: Liveness,
        audit: Audit,
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._limit = limit
        self._peers = peers
        self._audit = audit
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """Enrolment key -> registrations it has left, and when that was."""

    def register(self, public_key: str, member: Member) -> Receipt | Refusal:
        """Register a key for the holder of an enrolment key.

        Raises:
            SettingsError: The key cannot be registered.
        """
        if not self._takes_turn(member.name):
            return BUSY
        name = self._keys.register(public_key.encode(), member.name)
        if name is None:
            text = (
                f"actors of the enrolment key {member.name} must be at most {self._limit}, "
                "got one more; raise it, stop some, or make another enrolment key with "
                "`nyala keys add NAME --role enrolment`"
            )
            return Refusal("full", text)
        return Receipt(name)

    def keep_house(self) -> None:
        """Note which registered keys are in use, and remove those that are not."""
        self._keys.mark_seen(peer.key for peer in self._peers if not self._peers.is_suspect(peer))
        for name in self._keys.forget_unused():
            self._audit.record("unused key removed", key=name)

    def _takes_turn(self, enrolment: str) -> bool:
        now = self._clock()
        left, at = self._buckets.get(enrolment, (float(BURST), now))
        left = min(float(BURST), left + PER_S * (now - at))
        if left < 1.0:
            return False
        self._buckets[enrolment] = (left - 1.0, now)
        return True
