"""Checks of a run that has begun: store, roles, refusals, leases, clocks, code of this machine.

A check returns the text of its line, or a `CheckWarning`. It raises `SettingsError` for what it
finds wrong, and `StoreError` if Redis does not answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from buffer import operations
from buffer.client.server_state import read_server_state
from buffer.operations.run import brokers
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from buffer.record.object_store import is_reference
from buffer.sampling import closed_lines
from buffer.store import Store
from configs.errors import RecordError, SettingsError
from configs.hashes import run_hashes
from configs.json_lines import read_rows
from configs.loader import load
from configs.settings import Settings
from console.display.progress import stopped_line
from console.display.snapshot import duration
from console.run.checks.check import Check, CheckWarning
from console.run.checks.store import GROUP as REDIS
from console.run.checks.store import REACHED
from console.run.run_folder import RunFolder, current_versions, read_versions

# --------------------------------------------------------------------------------------------------
# Clocks of a run's machines against Redis', by which all leases are timed.
#
# This machine's is compared with Redis' TIME, to half a round trip. Heartbeats carry no time, so an
# actor's is bounded by its episodes: it began one after the lease, whose fence is Redis' time, and
# had finished it before now.
#
#     newest finished_at - now  <=  actor's clock - Redis' clock  <=  smallest started_at - fence

MOST_SKEW_S = 2.0
"""One heartbeat: a larger skew shows in printed ages and times. No deadline depends on it."""
NUM_GROUPS = 32
"""Number of groups, among those that wait for the next batches, whose episodes are read."""
REMEDY = "set the clocks of all machines by NTP (chrony, systemd-timesyncd)"


def check_machine_clock(url: str) -> str:
    """Check that this machine's clock agrees with Redis'.

    Raises:
        SettingsError: The clocks differ.
    """
    offset = read_server_state(url).clock
    figures = f"{offset.ahead_s:+.3f} s (give or take {offset.within_s:.3f} s)"
    if offset.least_s > MOST_SKEW_S:
        raise SettingsError(
            f"the clock of the Redis server must be within {MOST_SKEW_S:g} s of this machine's, "
            f"got {figures}, by which ages and times in `nyala status` and reports are wrong; "
            f"{REMEDY}"
        )
    return f"Redis' is {figures} of this machine's"


def check_actor_clocks(store: Store, url: str) -> str:
    """Check that the actors' clocks agree with Redis', as far as waiting episodes show it.

    Raises:
        SettingsError: A clock differs.
    """
    episodes = list(_waiting_episodes(store))
    now = time.time() + read_server_state(url).clock.ahead_s
    bounds = clock_bounds(episodes, now)
    wrong = [
        f"{name} is {'ahead' if low > 0 else 'behind'} by at least {max(low, -high):.1f} s"
        for name, (low, high) in bounds.items()
        if max(low, -high) > MOST_SKEW_S
    ]
    if wrong:
        raise SettingsError(
            f"the clocks of actors must be within {MOST_SKEW_S:g} s of Redis', got: "
            f"{'; '.join(wrong)}; {REMEDY}"
        )
    if not bounds:
        return "not known: no complete group waits at this moment"
    listed = ", ".join(
        f"{name} {low:+.1f} to {high:+.1f} s" for name, (low, high) in bounds.items()
    )
    return f"ahead of Redis': {listed}"


def clock_bounds(episodes: Iterable[Episode], now: float) -> dict[str, tuple[float, float]]:
    """Bound how far each actor's clock is ahead of Redis'; seconds.

    Args:
        episodes: Whole ones.
        now: Redis' clock after they were read, Unix seconds.

    Returns:
        Least and most by actor; most is infinite where it has begun none of these episodes.
    """
    bounds: dict[str, tuple[float, float]] = defaultdict(lambda: (-math.inf, math.inf))
    for episode in episodes:
        low, high = bounds[episode.incarnation]
        low = max(low, episode.finished_at - now)
        fences = episode.completion.fences
        if fences and fences[0].incarnation == episode.incarnation:
            high = min(high, episode.started_at - fences[0].fence / 1e6)
        bounds[episode.incarnation] = low, high
    return dict(bounds)


def _waiting_episodes(store: Store) -> Iterable[Episode]:
    for unit in store.run(operations.peek(NUM_GROUPS)):
        for record in store.run(operations.records(unit.task_ids)):
            if record is None or is_reference(record):
                continue
            try:
                yield decode_episode(record)
            except RecordError:
                continue  # the learner names it


# --------------------------------------------------------------------------------------------------
# Checks of a run that has begun: code and versions here against its own, roles, refusals, keys.

GROUP = "run"
ROUTINE = frozenset({"store", "hello"})
"""Refusals that belong to every restart."""
SHOWN = 5
"""Refusals that one line names."""


def run_checks(settings: Settings, folder: RunFolder, url: str | None) -> list[Check]:
    """List the checks of a run that has begun.

    Args:
        settings: Settings of the run.
        folder: Folder of the run.
        url: Address of the run's Redis; None = it does not run, so its state is not checked.
    """
    checks = [
        Check(GROUP, "state", lambda: _describe_state(folder)),
        Check(GROUP, "versions", lambda: check_versions(folder)),
    ]
    if url is None:
        return checks
    place, name = url, settings.run.name
    limit_s = settings.broker.heartbeat_timeout_s

    def asking(
        what: str, look: Callable[[Store], str | CheckWarning], needs: str = "store"
    ) -> Check:
        def ask() -> str | CheckWarning:
            with Store(place, run=name) as store:
                return look(store)

        return Check(GROUP, what, ask, needs)

    return [
        *checks,
        Check(REDIS, "clock", lambda: check_machine_clock(place), REACHED),
        asking("store", check_store, needs=""),
        asking("code", lambda store: check_code(settings, store)),
        asking("brokers", lambda store: check_brokers(store, limit_s)),
        asking("actors", lambda store: check_actors(store, limit_s)),
        asking("refusals", lambda store: check_refusals(store, folder)),
        asking("leases", lambda store: check_leases(store, folder)),
        asking("clocks", lambda store: check_actor_clocks(store, place)),
    ]


def check_store(store: Store) -> str:
    """Check that Redis answers with the run's tasks, each of which has one place.

    Raises:
        StoreError: Redis does not answer.
        SettingsError: Tasks are in no place.
    """
    stats = store.run(operations.stats())
    if stats.created != stats.accounted:
        raise SettingsError(
            f"every task of the run must have one place in the store, got {stats.accounted} places "
            f"for {stats.created} tasks; look at the log of Redis for lost writes, and report it "
            f"with the output of `nyala buffer stats`"
        )
    return f"{stats.state}, {stats.created} tasks, {stats.dead} dead letters"


def check_versions(folder: RunFolder) -> str | CheckWarning:
    """Check that packages of this machine are those that the run was started with."""
    then, now = read_versions(folder.path), current_versions()
    changed = [
        f"{name} {then.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    if then and changed:
        return CheckWarning(
            f"versions should be those of the run's start, got {', '.join(changed)}; install the "
            f"earlier ones, or let roles that are started again use these"
        )
    return f"{len(now)} as in versions.json" if then else "the run wrote no versions.json"


def check_code(settings: Settings, store: Store) -> str:
    """Check that settings, environments and rewards here are those with which the run began.

    Raises:
        SettingsError: They differ: an actor that is started here would be refused.
    """
    stats, here = store.run(operations.stats()), run_hashes(settings.run)
    if not stats.hashes:
        return "the learner has not entered its own yet"
    differing = [part for part, digest in stats.hashes.items() if here.get(part) != digest]
    if differing:
        raise SettingsError(
            f"{', '.join(differing)} on this machine must be as when the run began, got other "
            f"settings, files or packages, with which the broker would refuse an actor; restore "
            f"them, or begin anew with `nyala up --fresh`"
        )
    hashes = ", ".join(f"{part} {digest:.12}" for part, digest in sorted(stats.hashes.items()))
    return f"learner's life {stats.lineage}, batch {stats.version}; {hashes}"


def check_brokers(store: Store, limit_s: float) -> str | CheckWarning:
    """Check that a broker of the run has reported lately."""
    ages = {
        endpoint: max(0.0, time.time() - figures.get("at", 0.0))
        for endpoint, figures in store.run(brokers()).items()
    }
    listed = ", ".join(f"{endpoint} {duration(age)} ago" for endpoint, age in ages.items())
    if not ages or min(ages.values()) > limit_s:
        return CheckWarning(
            f"a broker should have been heard of within {limit_s:g} s, got {listed or 'none'}; if "
            f"the run is meant to be up, look at `nyala logs RUN broker`"
        )
    return f"heard of {listed}"


def check_actors(store: Store, limit_s: float) -> str | CheckWarning:
    """Check that actors sample and have the run's hashes, without which the broker refuses them."""
    seen = store.run(operations.actors())
    alive = [actor for actor in seen if actor.is_present(limit_s)]
    if not alive:
        return CheckWarning(
            f"an actor should have been heard of within {limit_s:g} s, got none ({len(seen)} "
            f"within the last hour); start one with `nyala actor RUN`"
        )
    listed = [
        f"{actor.incarnation.partition(chr(10))[0]} on {actor.fields.get('host', '?')} with "
        f"weights {actor.fields.get('version', 'none yet')}"
        for actor in alive
    ]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{len(alive)} joined with the run's hashes: {', '.join(listed[:SHOWN])}{more}"


def check_refusals(store: Store, folder: RunFolder) -> str | CheckWarning:
    """Check that no peer was refused, except as every restart brings about."""
    counts: Counter[str] = Counter()
    for figures in store.run(brokers()).values():
        for name, count in figures.items():
            if name.startswith("refused_") and name.removeprefix("refused_") not in ROUTINE:
                counts[name.removeprefix("refused_")] += int(count)
    if not counts:
        return "none"
    lines = [
        f"{row.get('code')} of {row.get('peer')}: {row.get('text')}"
        for row in read_rows(folder.path / "logs" / "audit.jsonl")
        if row.get("event") == "refused" and row.get("text")
    ]
    total = ", ".join(f"{count} x {code}" for code, count in sorted(counts.items()))
    reasons = "".join(f"\n  {line}" for line in dict.fromkeys(lines[-SHOWN:]))
    return CheckWarning(
        f"no peer should be refused, got {total}; after a `mismatch`, give that machine the run's "
        f"own files with `nyala join-pack`; for refused keys see docs/security.md{reasons}"
    )


def check_leases(store: Store, folder: RunFolder) -> str | CheckWarning:
    """Check that leases are granted to every key."""
    lines = closed_lines(store.run(operations.closed()), folder.path)
    return CheckWarning("; ".join(lines)) if lines else "granted to all"


def _describe_state(folder: RunFolder) -> str:
    if folder.is_stopped:
        return stopped_line(folder, steps=load(folder.config).run.steps)
    newest = folder.newest_checkpoint() or "none yet"
    up = "up" if folder.is_held else "not up on this machine"
    return f"{folder.state}, {up}; newest checkpoint {newest}"
