"""Heartbeats: every lease is kept alive, and tokens of unfinished episodes are stored.

Waits for the clock and the broker, never for the engine. A lease that another actor holds by now is
given up at once, so that no more tokens are made for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from msgspec import structs

from actors.engine.engine import Engine
from broker.protocol.messages import Beat, BeatRequest, Figures, Publication
from configs.errors import RefusedError
from configs.settings import ActorSettings

from .held_leases import HeldLeases, portions
from .interfaces import BrokerApi
from .sampling import Sampling

PUNCTUALITY = 0.9  # of a pause: ticks are never exactly as far apart as they should be
FINAL_ROUNDS = 2  # the second one closes gaps that the first has found


class Heartbeat:
    """Reports all leases of one actor to the broker."""

    def __init__(
        self,
        broker: BrokerApi,
        engine: Engine,
        sampling: Sampling,
        *,
        leases: HeldLeases,
        settings: ActorSettings,
        on_publication: Callable[[Publication | None], None],
        of_weights: Callable[[], Mapping[str, float]] = dict,
        deadline_s: float,
    ) -> None:
        """Connect the parts.

        Args:
            broker: Receives the heartbeats.
            engine: Its version is sent along.
            sampling: Its figures are sent along, and it drops lost leases.
            leases: The leases to keep alive.
            settings: The pauses.
            on_publication: Called with the newest address of the weights.
            of_weights: Figures of the receiver, by their names in `Figures`.
            deadline_s: Longest silence of the broker.
        """
        self._broker = broker
        self._engine = engine
        self._sampling = sampling
        self._leases = leases
        self._heartbeat_s = settings.heartbeat_s
        self._period_s = min(settings.heartbeat_s, settings.snapshot_s)
        self._on_publication = on_publication
        self._of_weights = of_weights
        self._deadline_s = deadline_s
        self._sent_at = float("-inf")

    @property
    def silent_s(self) -> float:
        """Time since the broker last answered a heartbeat; infinite before the first answer."""
        return time.monotonic() - self._sent_at

    async def run(self) -> None:
        """Send heartbeats until cancelled.

        An episode whose tokens the broker calls malformed is failed, and the others go on.

        Raises:
            DeadlineError: The broker does not answer for `deadline_s`.
            RefusedError: The broker refuses this actor.
        """
        while True:
            beats = self._leases.due()
            if beats or time.monotonic() - self._sent_at >= PUNCTUALITY * self._heartbeat_s:
                await self._send(beats)
            await asyncio.sleep(self._period_s)

    async def send_last(self) -> None:
        """Store all tokens that the store lacks, before leases are released; raises as `run`."""
        for _ in range(FINAL_ROUNDS):
            beats = self._leases.due(final=True)
            if beats:
                await self._send(beats)

    async def _send(self, beats: list[Beat]) -> None:
        stats = structs.replace(self._sampling.report(), **self._of_weights())
        for portion in portions(beats) if beats else [()]:
            await self._send_portion(portion, stats)

    async def _send_portion(self, portion: tuple[Beat, ...], stats: Figures) -> None:
        request = BeatRequest(portion, self._engine.version, stats)
        try:
            reply = await self._broker.beat(request, deadline_s=self._deadline_s)
        except RefusedError as error:
            if error.code != "malformed" or not portion:
                raise
            first, *others = portion
            if others:  # the tokens of one lease are malformed
                for beat in portion:
                    await self._send_portion((beat,), stats)
            else:
                self._sampling.give_up(first, f"snapshot refused: {error}")
            return
        self._sent_at = time.monotonic()
        self._on_publication(reply.publication)
        for held in self._leases.apply_verdicts(portion, reply.verdicts):
            self._sampling.lose(held)
