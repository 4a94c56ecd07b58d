"""Time for which generation has paused for swaps, as actors say with each JOIN."""

from __future__ import annotations

from collections.abc import Container

from broker.protocol.weight_messages import Join


class Pauses:
    """Time for which generation has paused for swaps, over all actors of this publisher's life.

    Each JOIN carries both totals of its incarnation; the difference to its last JOIN is added.
    """

    def __init__(self) -> None:
        self._last: dict[str, Join] = {}
        self.paused_s = 0.0
        """Paused for swaps."""
        self.served_s = 0.0
        """With weights to serve, those pauses included."""

    def on_join(self, actor: str, join: Join) -> None:
        """Count what has passed since this actor's last JOIN."""
        last = self._last.get(actor)
        if last is not None:
            self.paused_s += max(join.paused_s - last.paused_s, 0.0)
            self.served_s += max(join.served_s - last.served_s, 0.0)
        self._last[actor] = join

    def forget_all_but(self, live: Container[str]) -> None:
        """Drop silent actors; their times stay counted."""
        self._last = {actor: join for actor, join in self._last.items() if actor in live}
