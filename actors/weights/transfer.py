"""From the news of a version to its bytes in shared memory, digest checked: one transfer at a time.

Consumes ANNOUNCE and what follows it; waits for the group or for slices; a newer announcement, an
ABORT or a deadline unblocks it. Out of the publisher's memory where that is this machine's, by
group where the publisher invites us, by pull in every other case: a chain of sparse updates where
one begins at what is staged, else all bytes. Knows nothing of engines: it stages, the receiver
applies.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from functools import partial

import structlog

from broker.protocol.manifest import SparseLink, WeightManifest, digest_of
from broker.protocol.weight_messages import Abort, Announce, Chunk, Epoch, Moved, Send, Sources
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, WeightsError

from .counters import TransferCounters
from .group_member import WeightMember
from .held import HeldWeights
from .publisher_memory import PublisherMemory
from .pull import WeightPull
from .sources import WeightSources
from .staging_files import StagingFile, StagingFiles
from .weight_updates import chain_between, rebuild

log = structlog.get_logger()

NOTHING = PolicyVersion(-1, -1)
"""Before the first version; older than all."""
SHORT_BYTES = 4 * 2**20
"""Read on the event loop, in a millisecond or two: a thread takes about as long to come and go."""
MAX_MISMATCHES = 3
"""Pulls with a wrong digest before the actor gives up: CURVE has already excluded the network."""


class WeightTransfer:
    """Stages the newest version that it hears of.

    Args:
        files: Where the bytes are put.
        post: Sends a message to the publisher; may lose it.
        sources: Whom to pull from.
        stage: Takes a whole version, and the file with it.
        timeout_s: Time for a broadcast, and for a pull to make progress.
    """

    def __init__(
        self,
        files: StagingFiles,
        *,
        post: Callable[[object], bool],
        sources: WeightSources,
        stage: Callable[[WeightManifest, StagingFile], None],
        timeout_s: float,
    ) -> None:
        self._files = files
        self._sources = sources
        self._stage = stage
        self._timeout_s = timeout_s
        self._member = WeightMember(post)
        self._pull: WeightPull | None = None
        self._wanted: WeightManifest | None = None
        self._links: tuple[SparseLink, ...] = ()
        self._offered: Sources | None = None
        self._memory, self._memory_path = PublisherMemory(), ""
        self._base: tuple[PolicyVersion, StagingFile] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._is_by_group = False
        self.held = NOTHING
        """The newest version that is staged or applied here."""
        self.reads_memory = False
        """The publisher's memory is this machine's: no version need travel."""
        self.shared = HeldWeights()
        """What of it other actors can have."""
        self.counters = TransferCounters()

    async def run(self) -> None:
        """Transfer until cancelled.

        Raises:
            WeightsError: a version cannot be had with its digest, or there is no room for it.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.Event().wait()  # transfers start as news arrive
        finally:
            self._member.leave()
            self._sources.close()

    def take(self, message: Announce | Epoch | Send | Abort | Chunk | Moved) -> None:
        """Take a message of the publisher."""
        match message:
            case Announce():
                self._announced(message)
            case Epoch() | Send() | Abort():
                self._member.take(message)
            case Chunk() | Moved():
                if self._pull is not None:
                    self._pull.take(message)

    def pull_again(self, manifest: WeightManifest) -> None:
        """Pull this version, or a newer one, although it is already here."""
        self.held = PolicyVersion(manifest.version.lineage, -1)  # older than all of this lineage
        self._forget_base()
        if self._wanted is None or self._wanted.version < manifest.version:
            self._wanted = manifest
        self._start(self._wanted, by_group=False)

    def _announced(self, news: Announce) -> None:
        """Start a transfer, unless a better one is under way."""
        version = news.manifest.version
        if version.lineage < self.held.lineage:
            log.warning("weights refused: lower lineage", offered=tuple(version))
        if version <= self.held:
            return
        self.reads_memory = self._sources.has_memory and self._memory.has(news.memory)
        if not (news.epoch or self.reads_memory or self._sources.of(news.sources)):
            return  # others will have it soon
        known = self._wanted
        self._want(news)
        is_busy = any(not task.done() for task in self._running)
        is_same = known is not None and known.version == version
        if news.epoch:
            if not (is_busy and is_same):
                self._member.expect(version)
                self._start(news.manifest, by_group=True)
        elif not is_busy or self._is_by_group:
            self._start(news.manifest, by_group=False)
        # Else a pull goes on: it ends with a whole version, and then the newest is wanted.

    def _start(self, manifest: WeightManifest, *, by_group: bool) -> None:
        overtaken = tuple(self._running)
        for task in overtaken:
            task.cancel()
        self._is_by_group = by_group
        task = self._tasks.create_task(self._fetch(manifest, overtaken, by_group=by_group))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _fetch(
        self, manifest: WeightManifest, overtaken: tuple[asyncio.Task[None], ...], *, by_group: bool
    ) -> None:
        """Stage this version, or a newer one if it is overtaken."""
        if overtaken:
            await asyncio.wait(overtaken)  # they let go of the group and of their files first
        started = time.monotonic()
        if by_group and await self._receive(manifest):
            self.counters.broadcasts += 1
        else:
            self._is_by_group = False
            try:
                await self._pull_newest()
            except DeadlineError as error:
                log.warning("pull given up", reason=str(error))
                return
        self.counters.transfer_s += time.monotonic() - started

    async def _receive(self, manifest: WeightManifest) -> bool:
        """Take part in the epoch that brings this version."""
        file = self._files.take(manifest.num_bytes)
        is_whole = False
        try:
            is_whole = await self._member.receive(manifest, file.memory, timeout_s=self._timeout_s)
        finally:
            if not is_whole:
                self._files.discard(file)  # a stuck collective may still write to it
        if is_whole:
            self._hand_over(manifest, file)
        return is_whole

    async def _pull_newest(self) -> None:
        """Read or pull until what is held is the newest version that we know of."""
        mismatches = 0
        while self._wanted is not None and self._wanted.version > self.held:
            manifest = self._wanted
            file = self._files.take(manifest.num_bytes)
            is_whole = False
            try:
                is_whole = await self._fill(manifest, file)
            finally:
                if not is_whole:
                    self.shared.abandon()
                    self._files.discard(file)  # if this was cancelled, a thread may still write
            if is_whole:
                self._hand_over(manifest, file)
            elif self._wanted.version == manifest.version:
                mismatches += 1
                if mismatches == MAX_MISMATCHES:
                    raise WeightsError(
                        f"digest of weights {tuple(manifest.version)} must be {manifest.digest}, "
                        f"got another one {mismatches} times; the memory of the publisher or of "
                        "this machine is corrupt"
                    )

    async def _fill(self, manifest: WeightManifest, file: StagingFile) -> bool:
        """Fill the file. False: overtaken (then `_wanted` is newer), or not the right bytes."""
        if self.reads_memory and await self._read(manifest, file):
            self.counters.memory_reads += 1
            return True
        base, chain = self._base, self._chain_to(manifest)
        if base is None or not chain:
            self.shared.begin(manifest.version, file.memory)
            if not await self._pull_into(file.memory, manifest.version):
                return False
        else:
            updates = [bytearray(link.num_bytes) for link in chain]
            for link, update in zip(chain, updates, strict=True):
                if not await self._pull_into(update, link.version, base=link.base):
                    return False
            try:
                await asyncio.to_thread(rebuild, file.memory, base[1].memory, updates, manifest)
            except WeightsError as error:
                log.warning("sparse update refused", reason=str(error))
                self._forget_base()
                return False
        if await asyncio.to_thread(digest_of, [file.memory]) == manifest.digest:
            self.counters.pulls += 1
            self.counters.sparse_pulls += bool(chain)
            return True
        self.counters.digest_mismatches += 1
        self._forget_base()  # then the next try takes all bytes,
        self._offered = None  # from the publisher
        log.warning("pulled weights have a wrong digest", pulled=tuple(manifest.version))
        return False

    async def _read(self, manifest: WeightManifest, file: StagingFile) -> bool:
        """Read the version from the publisher's memory. False: pull it instead."""
        read = partial(self._memory.read, self._memory_path, manifest, file.memory)
        try:
            if manifest.num_bytes > SHORT_BYTES:
                await asyncio.to_thread(read)
            else:
                read()
        except WeightsError as error:
            log.warning("publisher's memory not read", reason=str(error))
            return False
        return True

    def _chain_to(self, manifest: WeightManifest) -> tuple[SparseLink, ...]:
        """Return the updates that lead from what is here to this version; none: take all bytes."""
        if self._base is None or len(self._base[1].memory) != manifest.num_bytes:
            return ()
        if not self._sources.has_publisher:  # who alone has updates
            return ()
        return chain_between(self._base[0], manifest, self._links)

    async def _pull_into(
        self,
        memory: mmap.mmap | bytearray,
        version: PolicyVersion,
        *,
        base: PolicyVersion | None = None,
    ) -> bool:
        """Fill `memory`. False: the publisher offers something else, which `_wanted` now is."""
        offered = self._offered if base is None else None
        self._pull = pull = WeightPull(
            version,
            memory,
            sources=self._sources.of(offered),
            base=base,
            digests=offered.digests if offered is not None else b"",
            failed=self._sources.failed,
            arrived=self.shared.arrived,
            progress_timeout_s=self._timeout_s,
        )
        try:
            moved = await pull.run()
        finally:
            self._pull = None
            self.counters.peer_bytes += pull.num_bytes["peers"]
            self.counters.store_bytes += pull.num_bytes["store"]
            self.counters.pulled_bytes += pull.num_bytes.total()
        if moved is None:
            return True
        if self._wanted is None or moved.manifest.version >= self._wanted.version:
            self._want(moved)
        return False

    def _want(self, news: Announce | Moved) -> None:
        self._wanted, self._links, self._offered = news.manifest, news.links, news.sources
        self._memory_path = news.memory

    def _hand_over(self, manifest: WeightManifest, file: StagingFile) -> None:
        self.held = manifest.version
        self._forget_base()
        self._files.share(file)
        self._base = manifest.version, file
        self.shared.hold(manifest.version, file.memory)
        self._stage(manifest, file)

    def _forget_base(self) -> None:
        if self._base is not None:
            self.shared.release()
            self._files.give_back(self._base[1])
            self._base = None
