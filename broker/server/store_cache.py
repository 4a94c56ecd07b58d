"""State of the store that every request needs, read at intervals by one call each.

The publication goes out with every reply, at most `PUBLICATION_S` old. The addresses of the run's
brokers go out with replies to HELLO and heartbeats. Memory pressure closes leasing, as do a pause
of the run and the suspension of a key.
"""

from __future__ import annotations

import time

import structlog

from broker.protocol.fields import MAX_BROKERS
from broker.protocol.messages import Publication, Refusal
from buffer import operations
from buffer.live_brokers import LiveBrokers
from buffer.operations.run import brokers
from buffer.operations.values import LeasingPauses
from buffer.record.episode import PolicyVersion
from buffer.store import AsyncStore

PUBLICATION_S = 0.2  # actors learn of new weights this late; a swap takes longer
MEMORY_S = 1.0
BROKERS_S = 1.0  # an actor gets a new address with its next heartbeat
SHRINK_AFTER = 10  # readings above the limit: by then trained episodes have begun to free memory
SHRINK_SHARE = 0.05  # of maxmemory in one call

log = structlog.get_logger()


class StoreCache:
    """What was read last: publication, brokers, memory pressure, and pauses of leasing.

    Each `refresh_*` reads again, and raises StoreError if the store cannot be read.
    """

    def __init__(
        self, store: AsyncStore, *, pause_at_memory: float, max_run_bytes: int | None = None
    ) -> None:
        self._store = store
        self._max_run_bytes = max_run_bytes
        self._pause_at_memory = pause_at_memory
        self.publication: Publication | None = None
        self._newest: PolicyVersion | None = None
        self.is_full = False
        """No new work may begin, as Redis or the run's share of it is full; finishing and releasing
        go on."""
        self.closed = LeasingPauses("", {})
        """Keys that get no leases, and a pause of the run, which the store obeys at once."""
        self._full_readings = 0
        self.brokers: tuple[str, ...] = ()
        """Addresses of the run's brokers."""
        self._live = LiveBrokers(at_most=MAX_BROKERS, clock=time.monotonic)

    async def refresh_brokers(self) -> None:
        """Read the addresses of the run's live brokers."""
        self.brokers = self._live.observe(await self._store.run(brokers()))

    async def refresh_publication(self) -> None:
        """Read the published version and the publisher's address."""
        stored = await self._store.run(operations.publication())
        if stored is None:
            return
        self.publication = Publication(
            version=stored.version,
            digest=stored.fields["digest"],
            endpoint=stored.fields["endpoint"],
            public_key=stored.fields["public_key"],
        )
        self._newest = max(stored.version, self._newest or stored.version)

    async def refuse_unpublished(self, newest: PolicyVersion | None) -> Refusal | None:
        """Return a refusal of tokens of a version that is not published yet; None if it is.

        A version that is not known is looked for in the store first, which may raise StoreError.

        An actor may have got a publication from another broker. The newest version that was ever
        read counts: a rewound store forgets versions that actors have sampled from, until the
        learner publishes again. Before the first publication nothing is refused.
        """
        if newest is None or self._newest is None:
            return None
        if newest > self._newest:
            await self.refresh_publication()
        if newest <= self._newest:
            return None
        text = f"tokens must be of a published version, got {newest.lineage}.{newest.step}"
        return Refusal("store", f"{text}, which the store does not know; send again later")

    async def refresh_closed(self) -> None:
        """Read whether leasing is paused, and the suspended keys; log a pause that is new."""
        before, self.closed = self.closed, await self._store.run(operations.closed())
        if self.closed.paused and not before.paused:
            log.error("LEASING IS PAUSED", why=self.closed.paused, next="nyala buffer resume RUN")

    async def refresh_memory(self) -> None:
        """Read the memory of Redis; if it stays full, drop chunks of tasks that wait.

        Above the limit nothing is leased, so no actor would finish those tasks and free their
        chunks.
        """
        most = self._max_run_bytes
        memory = await self._store.run(operations.memory(of_run=most is not None))
        is_full = memory.share >= self._pause_at_memory
        is_beyond_quota = most is not None and memory.run_bytes >= most
        if (is_full or is_beyond_quota) != self.is_full:
            log.warning(
                "leasing resumed" if self.is_full else "leasing paused",
                memory=memory.share,
                run_bytes=memory.run_bytes,
                max_run_bytes=most,
            )
        self.is_full = is_full or is_beyond_quota
        self._full_readings = self._full_readings + 1 if is_full else 0
        if self._full_readings > SHRINK_AFTER:
            least = int(SHRINK_SHARE * memory.limit_bytes)
            tasks, freed = await self._store.run(operations.shrink(least))
            if tasks:
                log.warning("tokens of waiting tasks dropped", tasks=tasks, bytes=freed)
