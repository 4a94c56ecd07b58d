"""Sampling as the store shows it: what is under way, and why nobody samples.

Pure: the caller asks the store. Slow episodes are no reason: while actors hold leases, all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from configs.settings import BufferSettings, RunSettings

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
    max_run_bytes: int | None,
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
        max_run_bytes: Of the run, above which none is, either; None = no limit.
    """
    if stats.state != RUNNING:
        return f"the run is {stats.state} and gives no work; its learner's log says why"
    if closed.paused:
        return closed_lines(closed, folder)[0]
    silences = [actor.silent_s for actor in actors]
    present = sum(silent_s <= heartbeat_timeout_s for silent_s in silences)
    if not present:
        heard = f"for {min(silences):.0f} s" if silences else "at all"
        return (
            f"no actor was heard {heard}; start one: nyala actor {folder} (the log of one that "
            "ended says why)"
        )
    if stats.leased:
        return None
    if memory.share >= pause_at_memory:
        return (
            f"Redis is {memory.share:.0%} full, so no work is given out above "
            f"buffer.pause_at_memory = {pause_at_memory:g}; raise buffer.maxmemory_mb, or lower "
            "learner.checkpoint_every so that records are deleted sooner"
        )
    if max_run_bytes is not None and memory.run_bytes >= max_run_bytes:
        return (
            f"the run has {memory.run_bytes} bytes in Redis, so no work is given out above "
            f"buffer.max_run_bytes = {max_run_bytes}; raise it, or lower learner.checkpoint_every "
            "so that records are deleted sooner"
        )
    if closed.keys:
        whys = "; ".join(f"{tag}: {key.why}" for tag, key in sorted(closed.keys.items())[:NAMED])
        return (
            f"{len(closed.keys)} keys are suspended, and no other actor has work ({whys}); "
            f"{_remedy(folder)}"
        )
    return (
        f"{present} actors are present and none has work, with {stats.ready} tasks ready; their "
        f"logs say why, and the last columns of: nyala status {folder}"
    )


def groups_in_flight(stats: Stats, run: RunSettings, buffer: BufferSettings) -> dict[str, int]:
    """Count the groups that are begun and not trained yet, by place, and the most there may be.

    Returns:
        `sampling`, `waiting` (complete, in no batch), `claimed` and `admitted`; the last is what
        actors with the newest weights may fill.
    """
    return {
        "sampling": stats.open_units,
        "waiting": stats.buffered_units,
        "claimed": sum(claim.units for claim in stats.claims if claim.k > stats.version),
        "admitted": int((run.max_policy_lag + 1) * run.groups_per_batch * buffer.margin),
    }


def closed_lines(closed: Closed, folder: object) -> list[str]:
    """Write to whom nothing is leased, why, and what helps.

    Args:
        closed: To whom nothing is leased.
        folder: Of the run, for the command.
    """
    lines = [f"leasing is paused: {closed.paused}"] if closed.paused else []
    lines += [
        f"the key {tag} gets no leases for {key.left_s:.0f} s: {key.why}"
        for tag, key in closed.keys.items()
    ]
    return [f"{line}; {_remedy(folder)}" for line in lines]


def _remedy(folder: object) -> str:
    return f"mend it, then: nyala buffer resume {folder}"


# --------------------------------------------------------------------------------------------------
# Brokers of a run that serve now, from the figures that each leaves in the store.
#
# No clock of another machine is believed: a broker serves as long as its figures change. One that
# stopped in order leaves them with `at: 0`.

FORGOTTEN_S = 10.0
"""Five reports missed."""
STOPPED = {"at": 0.0}
"""Figures of a broker that no longer serves."""


class LiveBrokers:
    """Remembers when the figures of each broker last changed."""

    def __init__(self, *, at_most: int, clock: Callable[[], float]) -> None:
        """Know of none.

        Args:
            at_most: Brokers that are named; of more, those that changed last.
            clock: Seconds.
        """
        self._at_most = at_most
        self._clock = clock
        self._changed: dict[str, tuple[float, float]] = {}
        """Endpoint -> (`at` of its figures, when this process first read that)."""

    def observe(self, found: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
        """Take what the store has of each broker; return the addresses of those that serve.

        One that is new to this process counts as serving until its figures stand still.
        """
        now = self._clock()
        before, self._changed = self._changed, {}
        for endpoint, figures in found.items():
            at = figures.get("at", 0.0)
            known = before.get(endpoint, (at, now))
            self._changed[endpoint] = known if known[0] == at else (at, now)
        living = [
            (changed, endpoint)
            for endpoint, (at, changed) in self._changed.items()
            if at and now - changed <= FORGOTTEN_S
        ]
        newest = sorted(living, key=lambda each: (-each[0], each[1]))[: self._at_most]
        return tuple(sorted(endpoint for _, endpoint in newest))
