"""How long generation has stood still for swaps, summed over all actors of this publisher's life.

Each JOIN says both times of its incarnation so far; what it adds to the last one counts.
"""

from __future__ import annotations

from collections.abc import Container

from broker.protocol.weight_messages import Join


class Pauses:
    """Sums the times in JOINs."""

    def __init__(self) -> None:
        self._last: dict[str, Join] = {}
        self.paused_s = 0.0
        """Stood still for swaps."""
        self.served_s = 0.0
        """Had weights to serve, those pauses included."""

    def heard(self, actor: str, join: Join) -> None:
        """Count what has passed since this actor's last JOIN."""
        last = self._last.get(actor)
        if last is not None:
            self.paused_s += max(join.paused_s - last.paused_s, 0.0)
            self.served_s += max(join.served_s - last.served_s, 0.0)
        self._last[actor] = join

    def forget_all_but(self, live: Container[str]) -> None:
        """Drop who is silent; what it has said stays counted."""
        self._last = {actor: join for actor, join in self._last.items() if actor in live}
