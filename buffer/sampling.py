"""Reasons why nobody samples although the learner waits, from what the store shows.

Pure: the caller asks the store. Slow episodes are no reason: while actors hold leases, all is well.
"""

from __future__ import annotations

from collections.abc import Iterable

from .operations.values import ActorSeen, Closed, Memory, Stats

RUNNING = "RUNNING"
NAMED = 3  # of suspended keys


def why_nobody_samples(
    stats: Stats,
    actors: Iterable[ActorSeen],
    memory: Memory,
    closed: Closed,
    *,
    folder: object,
    heartbeat_timeout_s: float,
    pause_at_memory: float,
) -> str | None:
    """Return the cause and what helps, in one sentence; None while somebody samples.

    Args:
        stats: Of the run.
        actors: All that were heard of within the hour.
        memory: Of Redis.
        closed: To whom nothing is leased.
        folder: Of the run, for the command.
        heartbeat_timeout_s: Longer silence is absence.
        pause_at_memory: Share of Redis' memory above which no work is leased.
    """
    if stats.state != RUNNING:
        return f"the run is {stats.state} and gives no work; its learner's log says why"
    if closed.paused:
        return f"leasing is paused: {closed.paused}; mend it, then: nyala buffer resume {folder}"
    silences = [actor.silent_s for actor in actors]
    present = sum(silent_s <= heartbeat_timeout_s for silent_s in silences)
    if not present:
        heard = f"for {min(silences):.0f} s" if silences else "at all"
        return f"no actor was heard {heard}; start one: nyala actor {folder}"
    if stats.leased:
        return None
    if memory.share >= pause_at_memory:
        return (
            f"Redis is {memory.share:.0%} full, so no work is given out above "
            f"buffer.pause_at_memory = {pause_at_memory:g}; raise buffer.maxmemory_mb, or lower "
            "learner.checkpoint_every so that records are deleted sooner"
        )
    if closed.keys:
        whys = "; ".join(f"{tag}: {key.why}" for tag, key in sorted(closed.keys.items())[:NAMED])
        return (
            f"{len(closed.keys)} keys are suspended, and no other actor has work ({whys}); mend "
            f"it, then: nyala buffer resume {folder}"
        )
    return (
        f"{present} actors are present and none has work, with {stats.ready} tasks ready; their "
        f"logs say why, and the last columns of: nyala status {folder}"
    )
