"""Watch of a run's store: live actors, why none samples, release of dead local actors' leases.

    `nyala up` sees a local actor end -> death pending -> the watch releases its leases
    store unreachable or recovering    death pending -> dropped after REPORT_WITHIN_S

It is a thread of `nyala up`, so that a Redis that does not answer cannot delay the supervisor.
`nyala top` looks at the store of a local run with it too.
The leases of an actor that died on another machine expire, as do those of a dropped death.
"""

from __future__ import annotations

import queue
import random
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from buffer import operations
from buffer.operations.values import ActorSeen, LeasingPauses, RedisMemory, Stats
from buffer.sampling import why_nobody_samples
from buffer.store import Store
from configs.errors import NyalaError
from configs.machine import full_disk
from configs.settings import Settings
from configs.worker import Worker

LOOK_EVERY_S = 2.0
RETRY_S = 1.0
JITTER = 0.5  # consoles of several machines do not all ask a Redis that has just come back at once
REPORT_WITHIN_S = 300.0  # Redis may load a log for minutes; later the id may be reused
MAX_PENDING = 1024  # as many actors as a broker serves by default


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What the store showed at one moment."""

    stats: Stats
    actors: tuple[ActorSeen, ...]
    memory: RedisMemory
    closed: LeasingPauses


class PendingDeaths:
    """Process ids of actors whose deaths the store has not recorded yet, oldest first.

    Bounded in number and in time. A death that is dropped loses no work, as its leases expire.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._give_up_at: dict[int, float] = {}

    def add(self, pid: int) -> None:
        """Remember a death; it replaces the oldest when there are too many."""
        self._give_up_at.pop(pid, None)
        self._give_up_at[pid] = self._clock() + REPORT_WITHIN_S
        if len(self._give_up_at) > MAX_PENDING:
            del self._give_up_at[next(iter(self._give_up_at))]

    def remove(self, pid: int) -> None:
        """Forget a death that the store has recorded."""
        del self._give_up_at[pid]

    def current(self) -> list[int]:
        """Drop deaths that are too old and return the process ids of the rest."""
        now = self._clock()
        self._give_up_at = {pid: end for pid, end in self._give_up_at.items() if now < end}
        return list(self._give_up_at)

    @property
    def pause_s(self) -> float:
        """Time until the next look at the store: short, with jitter, while a death is pending."""
        return RETRY_S * (1.0 + JITTER * self._jitter()) if self._give_up_at else LOOK_EVERY_S


class ActorWatch:
    """Looks at the store of a run every two seconds, and releases the leases of dead local actors.

    An actor is alive if it gave a sign of life within `broker.heartbeat_timeout_s`.

    Example:
        watch = ActorWatch(url, settings)
        watch.start()
        print(watch.alive)
        watch.report_death(4711)
        watch.check_watch_thread()
        watch.close()
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self._url = url
        self._settings = settings
        self._run, self._broker = settings.run.name, settings.broker
        self._reports: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._pending = PendingDeaths()
        self._newest: StoreLook | None = None
        self._has_looked = False
        # Never joined: a look at a dead server does not keep `nyala up` from ending.
        self._worker = Worker(self._watch, name="actor-watch")

    @property
    def newest(self) -> StoreLook | None:
        """What the store showed last; None before the first look and while Redis is unreachable."""
        return self._newest

    @property
    def has_looked(self) -> bool:
        """Whether a look has been tried, even if Redis did not answer."""
        return self._has_looked

    @property
    def alive(self) -> int | None:
        """Number of actors alive at the last look; None without a look."""
        newest, limit_s = self._newest, self._broker.heartbeat_timeout_s
        if newest is None:
            return None
        return sum(actor.samples(limit_s) for actor in newest.actors)

    def idle(self, *, num_processes: int = 0) -> str | None:
        """Return why no actor samples while the learner waits, as of the last look, or None.

        Args:
            num_processes: Number of actors that run on this machine.
        """
        newest = self._newest
        if newest is None:
            return None
        return idle_reason(
            self._settings,
            newest.stats,
            newest.actors,
            newest.memory,
            newest.closed,
            num_processes=num_processes,
        )

    def start(self) -> None:
        """Start the thread that looks at the store."""
        self._worker.start()

    def check_watch_thread(self) -> None:
        """Raise the exception that ended the thread, if there was one."""
        self._worker.raise_if_failed()

    def report_death(self, pid: int) -> None:
        """Have the leases of a local actor released, since its process has ended.

        Returns at once. The report is dropped if Redis does not answer for five minutes.
        """
        self._reports.put(pid)

    def close(self) -> None:
        """Have the thread end after its current look at the store; does not wait for it."""
        self._reports.put(None)

    def _watch(self) -> None:
        try:
            with Store(self._url, run=self._run) as store:
                is_open = True
                while is_open:
                    try:
                        self._look(store)
                    except NyalaError:
                        self._newest = None
                    self._has_looked = True
                    is_open = self._receive()
        finally:
            self._newest = None

    def _receive(self) -> bool:
        """Wait for a report or for the time of the next look; False once closed."""
        try:
            pid = self._reports.get(timeout=self._pending.pause_s)
        except queue.Empty:
            return True
        if pid is not None:
            self._pending.add(pid)
        return pid is not None

    def _look(self, store: Store) -> None:
        seen, stats = store.run(operations.actors()), store.run(operations.stats())
        has_quota = self._settings.buffer.max_run_bytes is not None
        memory = store.run(operations.memory(of_run=has_quota))
        closed = store.run(operations.closed())
        self._newest = StoreLook(stats, tuple(seen), memory, closed)
        pending = self._pending.current()
        # A store that is recovering releases nothing; afterwards no lease expires for a while.
        if pending and stats.state == "RUNNING":
            for pid in pending:
                self._release(store, seen, pid)
                self._pending.remove(pid)

    def _release(self, store: Store, seen: Iterable[ActorSeen], pid: int) -> None:
        here = {"host": socket.gethostname(), "pid": str(pid)}
        for actor in seen:
            if here.items() <= actor.fields.items():
                most = self._broker.max_attempts
                key = actor.fields.get("key", "")
                store.run(operations.release_dead_actor(actor.incarnation, key, max_attempts=most))


def idle_reason(
    settings: Settings,
    stats: Stats,
    seen: Iterable[ActorSeen],
    memory: RedisMemory,
    closed: LeasingPauses,
    *,
    num_processes: int = 0,
) -> str | None:
    """Return why no actor samples; None while one samples, or while the learner does not wait.

    Args:
        settings: Settings of the run.
        stats: Counts of the run in the store.
        seen: Actors that the store has seen.
        memory: Memory of Redis.
        closed: Pause of the run, and keys that get no leases.
        num_processes: Number of actors that run on this machine.
    """
    if all(claim.sealed for claim in stats.claims):
        return None
    # On a full disk Redis answers, but records no heartbeat of an actor.
    if (full := full_disk(settings.run.folder)) is not None:
        return full
    return why_nobody_samples(
        stats,
        seen,
        memory,
        closed,
        folder=settings.run.folder,
        heartbeat_timeout_s=settings.broker.heartbeat_timeout_s,
        pause_at_memory=settings.buffer.pause_at_memory,
        max_run_bytes=settings.buffer.max_run_bytes,
        num_processes=num_processes,
    )
