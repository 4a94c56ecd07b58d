"""From the news of a version to its bytes in shared memory, digest checked: one transfer at a time.

Consumes ANNOUNCE and what follows it; waits for the group or for slices; a newer announcement, an
ABORT or a deadline unblocks it. By group where the publisher invites us, by pull in every other
case. Knows nothing of engines: it stages, the receiver applies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from broker.manifest import WeightManifest, digest_of
from broker.weights import Abort, Announce, Chunk, Epoch, Moved, Send
from buffer.episode import PolicyVersion
from configs.errors import DeadlineError, WeightsError

from .staging_files import StagingFile, StagingFiles
from .weight_member import WeightMember
from .weight_pull import WeightPull

log = structlog.get_logger()

NOTHING = PolicyVersion(-1, -1)
"""Before the first version; older than all."""
MAX_MISMATCHES = 3
"""Pulls with a wrong digest before the actor gives up: CURVE has already excluded the network."""


@dataclass(slots=True)
class TransferCounters:
    """What has happened so far."""

    broadcasts: int = 0
    pulls: int = 0
    digest_mismatches: int = 0
    transfer_s: float = 0.0
    """From news to staged bytes, summed."""


class WeightTransfer:
    """Stages the newest version that it hears of.

    Args:
        files: Where the bytes are put.
        post: Sends a message to the publisher; may lose it.
        stage: Takes a whole version, and the file with it.
        timeout_s: Time for a broadcast, and for a pull to make progress.
    """

    def __init__(
        self,
        files: StagingFiles,
        *,
        post: Callable[[object], bool],
        stage: Callable[[WeightManifest, StagingFile], None],
        timeout_s: float,
    ) -> None:
        self._files = files
        self._post = post
        self._stage = stage
        self._timeout_s = timeout_s
        self._member = WeightMember(post)
        self._pull: WeightPull | None = None
        self._wanted: WeightManifest | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._is_by_group = False
        self.held = NOTHING
        """The newest version that is staged or applied here."""
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
        known, self._wanted = self._wanted, news.manifest
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
            self.counters.pulls += 1
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
        """Pull until what is held is the newest version that we know of."""
        mismatches = 0
        while self._wanted is not None and self._wanted.version > self.held:
            manifest = self._wanted
            file = self._files.take(manifest.num_bytes)
            is_whole = False
            try:
                is_whole = await self._pull_one(manifest, file)
            finally:
                if not is_whole:
                    self._files.give_back(file)
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

    async def _pull_one(self, manifest: WeightManifest, file: StagingFile) -> bool:
        """Fill the file. False: overtaken (then `_wanted` is newer), or a wrong digest."""
        self._pull = WeightPull(
            manifest, file.memory, post=self._post, progress_timeout_s=self._timeout_s
        )
        try:
            newer = await self._pull.run()
        finally:
            self._pull = None
        if newer is not None:
            if self._wanted is None or newer.version > self._wanted.version:
                self._wanted = newer
            return False
        digest = await asyncio.to_thread(digest_of, [file.memory])
        if digest == manifest.digest:
            return True
        self.counters.digest_mismatches += 1
        log.warning("pulled weights have a wrong digest", pulled=tuple(manifest.version))
        return False

    def _hand_over(self, manifest: WeightManifest, file: StagingFile) -> None:
        self.held = manifest.version
        self._stage(manifest, file)
