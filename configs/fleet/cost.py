"""The cost of a run's actors, and the end of its budget."""

from __future__ import annotations

from configs.tables.actors import FleetSettings


def cost(fleet: FleetSettings, actor_s: float) -> float | None:
    """Return what so many seconds of actors cost; None without a price."""
    price = fleet.price_per_actor_hour
    return None if price is None else price * actor_s / 3600


def overspent(fleet: FleetSettings, actor_s: float) -> str | None:
    """Explain that `fleet.max_total` is spent; None while it is not."""
    spent = cost(fleet, actor_s)
    if spent is None or fleet.max_total is None or spent < fleet.max_total:
        return None
    return (
        f"fleet.max_total must be above what the run's actors have cost, {spent:.2f}, to train on, "
        f"got {fleet.max_total:g}; raise it, and the same command goes on from the checkpoint"
    )
