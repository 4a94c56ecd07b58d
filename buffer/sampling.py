"""Sampling as the store shows it: groups under way, and the reason if no actor samples.

Pure: the caller reads the store. While actors have leases they sample, however slow episodes are;
but not where all of them wait for live agents, and no host runs one. Where finished episodes wait
for a teacher that is not there, no unit is completed, however much is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from configs.settings import BufferSettings, RunSettings

from .operations.values import ActorSeen, LeasingPauses, RedisMemory, Stats

RUNNING = "RUNNING"
NAMED = 3  # suspended keys in one text


def why_nobody_samples(
    stats: Stats,
    actors: Iterable[ActorSeen],
    memory: RedisMemory,
    closed: LeasingPauses,
    *,
    folder: object,
    heartbeat_timeout_s: float,
    pause_at_memory: float,
    max_run_bytes: int | None,
    num_processes: int = 0,
) -> str | None:
    """Return the cause and a remedy in one sentence; None while an actor may sample.

    Args:
        stats: State of the run.
        actors: All actors and teachers that were heard within the hour.
        memory: Memory of Redis.
        closed: Suspended keys, and a pause of the run.
        folder: Folder of the run, for the command.
        heartbeat_timeout_s: Silence after which an actor counts as absent.
        pause_at_memory: Share of Redis' memory above which no work is leased.
        max_run_bytes: Bytes of the run above which no work is leased; None = no limit.
        num_processes: Actor processes that the caller knows to run.
    """
    if stats.state != RUNNING:
        return f"the run is {stats.state} and gives no work; its learner's log says why"
    if closed.paused:
        return closed_lines(closed, folder)[0]
    seen = list(actors)
    if (missing := _missing_teacher(stats, seen, folder, heartbeat_timeout_s)) is not None:
        return missing
    present = sum(actor.samples(heartbeat_timeout_s) for actor in seen)
    if not present:
        return _nobody_heard(seen, folder, num_processes)
    if stats.leased:
        is_without_host = stats.wanted >= stats.leased and not stats.hosted
        return hosts_line(stats, folder) if is_without_host else None
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
            f"no actor has work, and keys are suspended: {len(closed.keys)} ({whys}); "
            f"{_remedy(folder)}"
        )
    return _no_work(stats, present, folder)


def _no_work(stats: Stats, present: int, folder: object) -> str:
    waiting = sum(stats.unscored.values()) + stats.scoring
    if waiting:
        slowest = max(stats.unscored, key=lambda name: stats.unscored[name])
        return (
            f"finished episodes that wait for their score: {waiting}, and until more are scored no "
            f"actor gets work; start more teachers: nyala actor {folder} --teacher {slowest}"
        )
    return (
        f"no actor has work (present: {present}, tasks ready: {stats.ready}); see the actors' "
        f"logs, and the last columns of: nyala status {folder}"
    )


def _missing_teacher(
    stats: Stats, seen: Sequence[ActorSeen], folder: object, limit_s: float
) -> str | None:
    present = {actor.teacher for actor in seen if actor.is_present(limit_s)}
    for name, waiting in sorted(stats.unscored.items()):
        if waiting and name not in present:
            return (
                f"finished episodes that wait for their score: {waiting}, and no process of their "
                f"teacher, {name}, was heard; start one: nyala actor {folder} --teacher {name} "
                "(the log of one that ended says why)"
            )
    return None


def hosts_line(stats: Stats, folder: object) -> str | None:
    """Write how many conversations wait for a host of live agents; None if none does.

    Args:
        stats: State of the run.
        folder: Folder of the run, for the command.
    """
    if not stats.wanted:
        return None
    line = (
        f"conversations that wait for a host of agents: {stats.wanted}, the first for "
        f"{stats.wanted_s:.0f} s"
    )
    if stats.hosted:
        return f"{line}; {stats.hosted} are under way"
    return f"{line}; start one: nyala agents {folder} (the log of one that runs says why it rests)"


def _nobody_heard(seen: Sequence[ActorSeen], folder: object, num_processes: int) -> str:
    actors = [actor for actor in seen if not actor.teacher]
    last = min(actors, key=lambda actor: actor.silent_s, default=None)
    heard = "at all" if last is None else f"for {last.silent_s:.0f} s"
    if num_processes:
        return (
            f"no actor was heard {heard} (processes: {num_processes}): they are starting, or "
            f"cannot reach the broker, or it cannot write to Redis; the logs in {folder} say which"
        )
    end = ""
    if last is not None:
        end = ", and the last one left" if last.has_left else ", as if it died"
    return (
        f"no actor was heard {heard}{end}; start one: nyala actor {folder} (the log of one that "
        "ended says why)"
    )


def groups_in_flight(stats: Stats, run: RunSettings, buffer: BufferSettings) -> dict[str, int]:
    """Count the groups that are begun and not trained yet, by place, and their upper bound.

    Returns:
        `sampling`, `waiting` (complete, in no batch), `claimed` and `admitted`; the last is the
        bound for actors with the newest weights.
    """
    return {
        "sampling": stats.open_units,
        "waiting": stats.buffered_units,
        "claimed": sum(claim.units for claim in stats.claims if claim.k > stats.version),
        "admitted": int((run.max_policy_lag + 1) * run.groups_per_batch * buffer.margin),
    }


def closed_lines(closed: LeasingPauses, folder: object) -> list[str]:
    """Write a line with reason and remedy for a pause of the run and for each suspended key.

    Args:
        closed: Suspended keys, and a pause of the run.
        folder: Folder of the run, for the command.
    """
    lines = [f"leasing is paused: {closed.paused}"] if closed.paused else []
    lines += [
        f"the key {tag} gets no leases for {key.left_s:.0f} s: {key.why}"
        for tag, key in closed.keys.items()
    ]
    return [f"{line}; {_remedy(folder)}" for line in lines]


def _remedy(folder: object) -> str:
    return f"mend the cause, then: nyala buffer resume {folder}"
