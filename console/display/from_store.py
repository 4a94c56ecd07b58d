"""The parts of a snapshot that the store has: actors, the fill of the buffer, what is closed."""

from __future__ import annotations

from dataclasses import replace

from buffer.sampling import closed_lines, groups_in_flight
from configs.settings import Settings
from console.run.actor_watch import StoreLook

from .snapshot import Fill, View


def with_store(view: View, look: StoreLook | None, settings: Settings) -> View:
    """Add what the store showed; nothing where it could not be asked."""
    if look is None:
        return view
    groups = groups_in_flight(look.stats, settings.run, settings.buffer)
    return replace(
        view,
        actors=look.actors,
        silent_after_s=settings.broker.heartbeat_timeout_s,
        fill=Fill(**groups, memory=look.memory.share),
        closed=tuple(closed_lines(look.closed, settings.run.folder)),
    )
