"""The parts of a snapshot that the store has: actors, the fill of the buffer, what is closed."""

from __future__ import annotations

from dataclasses import replace

from buffer.operations.values import Closed, Memory, Stats
from configs.settings import Settings
from console.run.actor_watch import StoreLook

from .figures import duration
from .snapshot import Fill, View


def with_store(view: View, look: StoreLook | None, settings: Settings) -> View:
    """Add what the store showed; nothing where it could not be asked."""
    if look is None:
        return view
    return replace(
        view,
        actors=look.actors,
        silent_after_s=settings.broker.heartbeat_timeout_s,
        fill=fill_of(look.stats, look.memory, settings),
        closed=tuple(closed_lines(look.closed)),
    )


def fill_of(stats: Stats, memory: Memory, settings: Settings) -> Fill:
    """Count the groups that admission counts, and its limit."""
    run = settings.run
    return Fill(
        sampling=stats.open_units,
        waiting=stats.buffered_units,
        claimed=sum(claim.units for claim in stats.claims if claim.k > stats.version),
        admitted=int((run.max_policy_lag + 1) * run.groups_per_batch * settings.buffer.margin),
        memory=memory.share,
    )


def closed_lines(closed: Closed) -> list[str]:
    """Write to whom nothing is leased."""
    lines = [
        f"the key {tag} gets no leases for {duration(key.left_s)}: {key.why}"
        for tag, key in closed.keys.items()
    ]
    return [f"leasing is paused: {closed.paused}", *lines] if closed.paused else lines
