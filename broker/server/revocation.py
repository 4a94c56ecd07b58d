"""What follows when a key is taken off the allow-list: its actors are known no more.

The reception refuses each message of such a key from the moment it is seen to be gone. Here the
broker forgets its incarnations, so that a LEASE of theirs that waits gets nothing; no heartbeat
prolongs what they hold, and it goes to others when `broker.lease_timeout_s` is over.
"""

from __future__ import annotations

from broker.transport.allow_list import AllowList

from .audit import Audit
from .liveness import Liveness

LOOK_S = 0.5  # with the time of one message, a removed key is refused within a second


class Revocation:
    """Follows the allow-list of one broker."""

    def __init__(self, allowed: AllowList, peers: Liveness, audit: Audit) -> None:
        self._allowed = allowed
        self._peers = peers
        self._audit = audit
        allowed.refresh()
        self._known = allowed.members()

    def look(self) -> None:
        """Read the list if it has changed, and act on who has left it or has another role."""
        self._allowed.refresh()
        known, now = self._known, self._allowed.members()
        if now is known:
            return
        self._known = now
        for key, member in known.items():
            left = now.get(key)
            if left is None or left.role is not member.role:
                actors = self._peers.forget_key(key.decode())
                self._audit.note("revoked", key=member.name, role=member.role, actors=actors)
        for key, member in now.items():
            if key not in known:
                self._audit.note("allowed", key=member.name, role=member.role)
