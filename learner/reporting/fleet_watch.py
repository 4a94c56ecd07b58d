"""The number of actors that the run wants, kept up to date beside training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from buffer.operations.values import ActorSeen
from configs.fleet.meter import Meter
from configs.fleet.wanted import Wanted, first_wanted, next_wanted
from configs.settings import Settings


class FleetWatch:
    """Takes what the store shows of actors, and the times of batches.

    One thread calls it; others read `wanted` and `present`, which are replaced as wholes.

    Args:
        settings: Of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._meter = Meter()
        self.wanted: Wanted = first_wanted(settings)
        """The newest number."""
        self.present = 0
        """Actors that were heard of lately, with weights or not."""

    def look(self, now_s: float, actors: Iterable[ActorSeen]) -> None:
        """Take the actors of one moment."""
        limit_s = self._settings.broker.heartbeat_timeout_s
        heard = [actor for actor in actors if actor.silent_s <= limit_s]
        self.present = len(heard)
        serving = {each.incarnation: each.fields for each in heard if "version" in each.fields}
        self._meter.look(
            now_s,
            {name: _figure(fields, "busy_s") for name, fields in serving.items()},
            version_s=max(
                (
                    _figure(fields, "weight_transfer_s") + _figure(fields, "weight_pause_s")
                    for fields in serving.values()
                ),
                default=0.0,
            ),
        )

    def batch(self, now_s: float, *, wait_s: float, span_s: float) -> None:
        """Take a batch: its wait for episodes, and its time as a whole."""
        measured = self._meter.batch(wait_s=wait_s, span_s=span_s)
        if measured is not None:
            self.wanted = next_wanted(self.wanted, measured, self._settings, now_s=now_s)


def _figure(fields: Mapping[str, str], name: str) -> float:
    """Read a figure that an actor has sent; 0 where it is none."""
    try:
        return float(fields.get(name, 0.0))
    except ValueError:
        return 0.0
