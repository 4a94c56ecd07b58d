"""Table, ratios and picture of the simulated fleets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Arms = Mapping[str, Mapping[str, Any]]

COLUMNS = {
    "learner idle": "learner_idle",
    "actors idle": "actor_idle",
    "places used": "places_used",
    "s a batch": "step_every_s",
    "lag, mean": "lag_mean",
    "p99": "lag_p99",
    "stale groups": "stale_groups_share",
    "broker MB/s": "broker_mb_per_s",
    "Redis MB/s": "redis_mb_per_s",
    "weights MB/s": "weights_mb_per_s",
    "beats/s": "beats_per_s",
    "broker cores": "broker_cores",
    "Redis cores": "redis_cores",
}


def table(arms: Arms) -> str:
    """Show the arms in Markdown."""
    lines = [f"| arm | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for name, figures in arms.items():
        lines.append(f"| {name} | {' | '.join(str(figures[key]) for key in COLUMNS.values())} |")
    return "\n".join(lines)


def ratios(arms: Arms) -> dict[str, float]:
    """Divide trained tokens per second by those of the next smaller fleet, all else equal."""
    found: dict[str, float] = {}
    for name, figures in arms.items():
        smaller = [
            other
            for other in arms.values()
            if other["actors"] < figures["actors"]
            and all(other[key] == figures[key] for key in ("lag", "batch", "transport"))
        ]
        if smaller:
            nearest = max(smaller, key=lambda other: other["actors"])
            ratio = figures["trained_tokens_per_s"] / nearest["trained_tokens_per_s"]
            found[f"{name} over {nearest['actors']}"] = round(ratio, 3)
    return found
