"""From the announcement of a version to its checked bytes in shared memory: one at a time.

Consumes ANNOUNCE and the messages that follow it. Waits for a transport; a newer announcement, an
ABORT or a deadline ends the wait. A version comes by the first of these transports that succeeds:

    group    if the publisher has invited this actor, because the other members wait for it
    memory   if the publisher is on this machine: nothing is copied
    pull     in every other case, and where group and memory fail

The engine is not touched here: bytes are staged, and the receiver applies them. Bytes in the
publisher's memory may be overwritten meanwhile; then the receiver calls `fetch_again`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import structlog

from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import (
    Abort,
    Announce,
    Epoch,
    Send,
    VersionReplaced,
    WeightChunk,
)
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, WeightsError

from .counters import WeightCounters
from .group import GroupMember
from .held import HeldWeights
from .memory import PublisherMemory
from .place import MemberPlace, OwnProcess
from .pull import WeightPull
from .sources import WeightSources
from .staging_files import StagingFile, StagingFiles
from .updates import WeightUpdates

log = structlog.get_logger()

NOTHING = PolicyVersion(-1, -1)
"""The version before the first one; older than all others."""
MAX_MISMATCHES = 3
"""Wrong digests in one transfer before the actor gives up; CURVE excludes errors of the network."""

FromPublisher: TypeAlias = Announce | Epoch | Send | Abort | WeightChunk | VersionReplaced


class Transport(Protocol):
    """A way for the bytes of a version to come here."""

    def can_fetch(self, wanted: Announce | VersionReplaced) -> bool:
        """Return whether this version may come this way."""
        ...

    async def fetch(self, wanted: Announce | VersionReplaced, file: StagingFile) -> bool:
        """Fill a file with a version and check it.

        Unless this returns True, a thread may still write to the file.

        Raises:
            DeadlineError: No progress is made, and no other transport is left to try.
        """
        ...


class WeightTransfer:
    """Stages the newest version that is announced.

    Args:
        files: Files for the bytes.
        post: Sends a message to the publisher; may lose it.
        sources: Sources of pulls.
        stage: Receives each complete version with its file.
        timeout_s: Time for a broadcast, and for a pull to make progress.
        place: Where groups are joined; None = this process.
    """

    def __init__(
        self,
        files: StagingFiles,
        *,
        post: Callable[[object], bool],
        sources: WeightSources,
        stage: Callable[[WeightManifest, StagingFile], None],
        timeout_s: float,
        place: MemberPlace | None = None,
    ) -> None:
        self.counters = WeightCounters()
        self.shared = HeldWeights()
        """Versions that other actors can pull from here."""
        self._files = files
        self._sources = sources
        self._stage = stage
        updates = WeightUpdates(self.shared, self.counters)
        self._group = GroupMember(
            post,
            updates,
            files,
            self.counters,
            place=place or OwnProcess(),
            timeout_s=timeout_s,
        )
        self._memory = PublisherMemory(self.counters)
        self._pull = WeightPull(sources, self.shared, updates, self.counters, timeout_s=timeout_s)
        memory = (self._memory,) if sources.has_memory else ()
        self._transports: tuple[Transport | PublisherMemory, ...] = (
            self._group,
            *memory,
            self._pull,
        )
        self._may_borrow = True
        self._wanted: Announce | VersionReplaced | None = None
        self._newest: StagingFile | None = None
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self.held = NOTHING
        """The newest version that is staged or applied here."""
        self.reads_memory = False
        """The publisher's memory is on this machine, so versions are not transferred."""

    async def run(self) -> None:
        """Transfer versions until cancelled.

        Raises:
            WeightsError: A version never comes with its digest, or there is no room for it.
        """
        try:
            async with self._tasks:
                try:
                    await asyncio.Event().wait()  # transfers start as announcements arrive
                finally:
                    self._has_ended = True
        finally:
            self._group.leave_group()
            self._sources.close()

    @property
    def awaited(self) -> tuple[int, int] | None:
        """Bytes received and bytes wanted while a sender is waited for; (0, 0) before any news.

        None = this actor works on received bytes, or is in a group, which has its own deadline.
        """
        if any(not task.done() for task in self._running):
            return self._pull.bytes_under_way
        return 0, 0

    def on_message(self, message: FromPublisher) -> None:
        """Process a message of the publisher."""
        match message:
            case Announce():
                self._on_announce(message)
            case Epoch() | Send() | Abort():
                self._group.on_message(message)
            case WeightChunk():
                self._pull.on_answer(message)
            case VersionReplaced():
                wanted = self._wanted
                if wanted is not None and message.manifest.version >= wanted.manifest.version:
                    self._wanted = message
                self._pull.on_answer(message)

    def fetch_again(self, *, may_borrow: bool = True) -> None:
        """Fetch the newest version although it is already here.

        Args:
            may_borrow: The version may be used where it lies in the publisher's memory.
        """
        self._may_borrow = may_borrow
        self.held = PolicyVersion(self.held.lineage, -1)  # older than all of this lineage
        self._release_newest()
        self._group.expect(None)
        self._start()

    def _on_announce(self, news: Announce) -> None:
        """Start a transfer, unless a better one is under way."""
        version = news.manifest.version
        if version.lineage < self.held.lineage:
            log.warning("weights refused: lower lineage", offered=tuple(version))
        if version <= self.held:
            return
        self.reads_memory = self._sources.has_memory and self._memory.can_fetch(news)
        is_same = self._is_wanted(version)
        is_busy = any(not task.done() for task in self._running)
        self._wanted = news
        if news.epoch:
            if not (is_busy and is_same):
                self._group.expect(version)
                self._start()
        elif not is_busy or self._group.is_expecting:
            self._group.expect(None)
            self._start()
        # Otherwise a pull goes on: it ends with a complete version, and the newest comes next.

    def _start(self) -> None:
        """Fetch the wanted version, in place of the transfer under way."""
        if self._has_ended:
            return  # the link still reads messages until it is cancelled too
        overtaken = tuple(self._running)
        for task in overtaken:
            task.cancel()
        task = self._tasks.create_task(self._transfer(overtaken))
        self._running.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._has_ended = True  # `run` gets the error a moment later

    async def _transfer(self, overtaken: tuple[asyncio.Task[None], ...]) -> None:
        """Fetch until the newest version is held."""
        if overtaken:
            await asyncio.wait(overtaken)  # they leave the group and release their files first
        started = time.monotonic()
        mismatches = 0
        while (wanted := self._wanted) is not None and wanted.manifest.version > self.held:
            version = wanted.manifest.version
            try:
                is_here = await self._fetch(version)
            except DeadlineError as error:
                log.warning("pull given up", reason=str(error))
                return
            if not is_here and self._is_wanted(version):
                mismatches += 1
                if mismatches == MAX_MISMATCHES:
                    raise WeightsError(
                        f"digest of weights {tuple(version)} must be "
                        f"{wanted.manifest.digest}, got another one {mismatches} times; check the "
                        "memory of the publisher's machine and of this one"
                    )
        self.counters.last_transfer_s = time.monotonic() - started
        self.counters.transfer_s += self.counters.last_transfer_s

    async def _fetch(self, version: PolicyVersion) -> bool:
        """Stage a version by the first transport that succeeds.

        False: no transport succeeded, or another version became wanted meanwhile.
        """
        for transport in self._transports:
            wanted = self._wanted  # announced again meanwhile, it may have other sources
            if wanted is None or not (self._is_wanted(version) and transport.can_fetch(wanted)):
                continue
            if isinstance(transport, PublisherMemory):
                file = await transport.borrow(wanted) if self._may_borrow else None
            else:
                file = await self._fill(transport, wanted)
            if file is not None:
                self._hand_over(wanted.manifest, file)
                return True
        return False

    async def _fill(
        self, transport: Transport, wanted: Announce | VersionReplaced
    ) -> StagingFile | None:
        """Let a transport fill a file; None if it has not brought the version."""
        file = self._files.acquire(wanted.manifest.num_bytes)
        is_whole = False
        try:
            is_whole = await transport.fetch(wanted, file)
        finally:
            if not is_whole:
                self._files.discard(file)
        return file if is_whole else None

    def _is_wanted(self, version: PolicyVersion) -> bool:
        return self._wanted is not None and self._wanted.manifest.version == version

    def _hand_over(self, manifest: WeightManifest, file: StagingFile) -> None:
        self.held = manifest.version
        self._may_borrow = True
        self._release_newest()
        self._files.share(file)
        self._newest = file
        self.shared.hold(manifest.version, file.memory, is_whole=file.is_whole)
        self._stage(manifest, file)

    def _release_newest(self) -> None:
        if self._newest is not None:
            self.shared.release()
            self._files.release(self._newest)
            self._newest = None
