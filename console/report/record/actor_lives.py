"""Lives of actors: when each joined, and how it ended.

Read from the broker's `logs/audit.jsonl`, and from the batches that trained an actor's episodes
where that file has been trimmed or belongs to a broker of another machine.

    joined -> left       it drained and took its leave
    joined -> died       another took its place, or no batch had an episode of it any more
    joined -> (open)     it sampled until the end
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from .curves import MAX_ACTORS, Curves

GONE_AFTER = 5  # batches without an episode of it, beyond the policy lag: it no longer samples


class End(StrEnum):
    """How a life ended."""

    LEFT = "left"
    DIED = "died"
    OPEN = "sampled until the end"


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of an actor."""

    name: str
    began: float
    """Unix seconds."""
    ended: float
    end: End
    episodes: int
    """That it finished and that were trained."""


def actor_lives(folder: Path, curves: Curves, *, max_policy_lag: int) -> list[Life]:
    """List the lives of a run's actors, the earliest first.

    Args:
        folder: Of the run.
        curves: Its figures.
        max_policy_lag: Episodes of an actor that has gone are trained for so many batches more.
    """
    if not curves.steps:
        return []
    newest = curves.times[-1]
    time_of = dict(zip(curves.steps, curves.times, strict=True))
    joined: dict[str, float] = {}
    ended: dict[str, tuple[float, End]] = {}
    for event, name, time in _events(folder / "logs" / "audit.jsonl"):
        if event == "actor joined" and (name in joined or len(joined) < MAX_ACTORS):
            joined[name] = time
            ended.pop(name, None)
        elif name in joined:
            ended[name] = time, End.LEFT if event == "actor left" else End.DIED
    lives: list[Life] = []
    for name in joined.keys() | curves.actors.keys():
        seen = curves.actors.get(name)
        began = joined.get(name) or time_of.get(seen.first if seen else -1, curves.times[0])
        last = seen.last if seen else -1
        trained_at = max(began, time_of.get(last, began))
        time, end = ended.get(name, (math.inf, End.OPEN))
        if time >= newest:  # with the run, or not at all
            is_gone = curves.steps[-1] - last > max_policy_lag + GONE_AFTER
            time, end = (trained_at, End.DIED) if is_gone else (newest, End.OPEN)
        elif end is End.DIED:
            time = min(time, trained_at)  # noticed when another took its place
        lives.append(Life(name, began, max(began, time), end, seen.episodes if seen else 0))
    return sorted(lives, key=lambda life: (life.began, life.name))


def _events(path: Path) -> Iterator[tuple[str, str, float]]:
    """Yield event, actor and Unix time of what concerns actors, the oldest first."""
    for each in (path.with_name(f"{path.name}.1"), path):
        if not each.exists():
            continue
        with each.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    time = datetime.fromisoformat(str(row["time"])).timestamp()
                    event, actor = str(row["event"]), str(row["actor"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # of another kind, or half a line
                if event in {"actor joined", "actor left", "actor replaced"}:
                    yield event, actor, time
