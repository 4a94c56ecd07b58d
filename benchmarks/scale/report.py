"""Table, ratios and picture of the simulated fleets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
COLOURS = ("C0", "C1", "C2", "C3")


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


def draw(arms: Arms, path: Path) -> None:
    """Draw idle shares and trained tokens over the number of actors, by lag and batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True)
    rows = [row for row in arms.values() if row["transport"] == "broadcast"]
    lags = sorted({row["lag"] for row in rows})
    for batch, style in zip(sorted({row["batch"] for row in rows}), ("-", "--"), strict=False):
        for lag, colour in zip(lags, COLOURS, strict=True):
            line = [row for row in rows if (row["batch"], row["lag"]) == (batch, lag)]
            if not line:
                continue
            actors = [row["actors"] for row in line]
            for axis, key in zip(
                axes, ("trained_tokens_per_s", "learner_idle", "actor_idle"), strict=True
            ):
                label = f"batch {batch:,}, lag {lag}"
                values = [row[key] for row in line]
                axis.plot(actors, values, style, color=colour, marker="o", label=label)
    titles = ("trained tokens/s", "learner waits", "actors without an episode")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="actors", xscale="log")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
