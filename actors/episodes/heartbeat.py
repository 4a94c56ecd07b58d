"""The actor's sign of life: every lease is kept, and the tokens of unfinished episodes are stored.

Waits for the clock and the broker, never for the engine. A lease that another actor holds by now is
reported at once, so that no more tokens are made for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from broker.protocol.messages import Beat, BeatRequest, Lease, Publication
from buffer.record.episode import PolicyVersion
from configs.settings import ActorSettings

from .held_leases import Snapshots, portions
from .interfaces import Broker

PUNCTUALITY = 0.9  # of a pause: ticks are never quite as far apart as they should be
FINAL_ROUNDS = 2  # the second one closes gaps that the first has found


class Heartbeat:
    """Speaks for all leases of one actor."""

    def __init__(
        self,
        broker: Broker,
        settings: ActorSettings,
        *,
        version: Callable[[], PolicyVersion],
        stats: Callable[[], dict[str, float]],
        on_lost: Callable[[Lease], None],
        on_publication: Callable[[Publication | None], None],
        deadline_s: float,
    ) -> None:
        """Connect the parts.

        Args:
            broker: To whom it speaks.
            settings: The pauses.
            version: What the engine samples from now.
            stats: Figures to send along.
            on_lost: Called for leases that another actor holds by now.
            on_publication: Called with the newest address of the weights.
            deadline_s: How long a silent broker is borne.
        """
        self._broker = broker
        self._heartbeat_s = settings.heartbeat_s
        self._period_s = min(settings.heartbeat_s, settings.snapshot_s)
        self._version = version
        self._stats = stats
        self._on_lost = on_lost
        self._on_publication = on_publication
        self._deadline_s = deadline_s
        self._said_at = float("-inf")
        self.snapshots = Snapshots(
            heartbeat_s=PUNCTUALITY * settings.heartbeat_s,
            snapshot_s=PUNCTUALITY * settings.snapshot_s,
            clock=time.monotonic,
        )

    async def run(self) -> None:
        """Beat until cancelled.

        Raises:
            DeadlineError: The broker is gone.
        """
        while True:
            beats = self.snapshots.due()
            if beats or time.monotonic() - self._said_at >= PUNCTUALITY * self._heartbeat_s:
                await self._say(beats)
            await asyncio.sleep(self._period_s)

    async def say_last(self) -> None:
        """Store all tokens that the store lacks; the leases are about to be given back."""
        for _ in range(FINAL_ROUNDS):
            beats = self.snapshots.due(final=True)
            if beats:
                await self._say(beats)

    async def _say(self, beats: list[Beat]) -> None:
        stats = self._stats()
        for portion in portions(beats) if beats else [()]:
            reply = await self._broker.beat(
                BeatRequest(portion, self._version(), stats), deadline_s=self._deadline_s
            )
            self._said_at = time.monotonic()
            self._on_publication(reply.publication)
            for lease in self.snapshots.settle(portion, reply.verdicts):
                self._on_lost(lease)
