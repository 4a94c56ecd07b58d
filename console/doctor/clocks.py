"""Clocks of a run's machines against Redis', by which all leases are timed.

This machine's is compared with Redis' TIME, to half a round trip. Heartbeats carry no time, so an
actor's is bounded by its episodes: it began one after the lease, whose fence is Redis' time, and
had finished it before now.

    newest finished_at - now  <=  actor's clock - Redis' clock  <=  smallest started_at - fence
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable

from buffer import operations
from buffer.client.server_state import read_server_state
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from buffer.record.object_store import is_reference
from buffer.store import Store
from configs.errors import RecordError, SettingsError

MOST_SKEW_S = 2.0
"""A heartbeat: more shows in the ages and times that people read. No deadline depends on it."""
NUM_GROUPS = 32
"""Of those that wait for the next batches; their episodes are read."""
REMEDY = "set the clocks by NTP (chrony, systemd-timesyncd) on both machines"


def check_machine_clock(url: str) -> str:
    """This machine's clock agrees with Redis'.

    Raises:
        SettingsError: It does not.
    """
    offset = read_server_state(url).clock
    figures = f"{offset.ahead_s:+.3f} s (within {offset.within_s:.3f} s)"
    if offset.least_s > MOST_SKEW_S:
        raise SettingsError(
            f"the clock of the Redis server must be within {MOST_SKEW_S:g} s of this machine's, "
            f"got {figures}: ages and times of `nyala status` and reports are wrong by it; {REMEDY}"
        )
    return f"Redis' is {figures} of this machine's"


def check_actor_clocks(store: Store, url: str) -> str:
    """The actors' clocks agree with Redis', as far as episodes that wait show it.

    Raises:
        SettingsError: One does not.
    """
    episodes = list(_waiting(store))
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


def _waiting(store: Store) -> Iterable[Episode]:
    for unit in store.run(operations.peek(NUM_GROUPS)):
        for record in store.run(operations.records(unit.task_ids)):
            if record is None or is_reference(record):
                continue
            try:
                yield decode_episode(record)
            except RecordError:
                continue  # the learner names it
