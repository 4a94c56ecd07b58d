"""Rules of the fleet; returns texts with what to change."""

from __future__ import annotations

from configs.tables.all_tables import AllTables


def fleet_disagreements(settings: AllTables) -> list[str]:
    """List bounds that contradict each other, each with what to change."""
    fleet, texts = settings.fleet, []
    most = fleet.max_actors or settings.broker.max_actors
    if fleet.min_actors > most:
        name = "fleet.max_actors" if fleet.max_actors else "broker.max_actors"
        texts.append(f"fleet.min_actors must be <= {name} = {most}, got {fleet.min_actors}")
    price = fleet.price_per_actor_hour
    if price is None:
        texts += [
            f"fleet.price_per_actor_hour must be set where {name} is, got null; a budget needs it"
            for name, value in (
                ("fleet.max_per_hour", fleet.max_per_hour),
                ("fleet.max_total", fleet.max_total),
            )
            if value is not None
        ]
    elif fleet.max_per_hour is not None and fleet.max_per_hour < price * fleet.min_actors:
        texts.append(
            f"fleet.max_per_hour must be >= fleet.price_per_actor_hour x fleet.min_actors = "
            f"{price * fleet.min_actors:g}, got {fleet.max_per_hour:g}; raise it, or want fewer"
        )
    return texts
