"""Transport through a weight group: join it, receive all bytes or updates, confirm, or leave it.

Consumes EPOCH, SEND and ABORT of the version that was announced. Waits for these messages and, in a
thread, for the collective; a deadline or an ABORT ends the wait. Keeps the group from version to
version.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from broker.protocol.manifest import BASE, SparseLink, WeightManifest
from broker.protocol.weight_messages import (
    Abort,
    Ack,
    Announce,
    Epoch,
    Ready,
    Send,
    VersionReplaced,
    WeightGroupFault,
)
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError

from .counters import WeightCounters
from .place import MemberPlace
from .staging_files import StagingFile, StagingFiles
from .updates import WeightUpdates

log = structlog.get_logger()
EpochMessage = Epoch | Send | Abort


class GroupMember:
    """Transport through a weight group; a member of at most one at a time.

    Args:
        post: Sends a message to the publisher; may lose it.
        updates: Makes versions from updates.
        files: Files for updates.
        counters: Counts versions and bytes received.
        place: Where groups are joined.
        timeout_s: Time from the announcement to the last byte.
    """

    def __init__(
        self,
        post: Callable[[object], bool],
        updates: WeightUpdates,
        files: StagingFiles,
        counters: WeightCounters,
        *,
        place: MemberPlace,
        timeout_s: float,
    ) -> None:
        self._post = post
        self._place = place
        self._updates = updates
        self._files = files
        self._counters = counters
        self._timeout_s = timeout_s
        self._expected: PolicyVersion | None = None
        self._inbox: asyncio.Queue[EpochMessage] = asyncio.Queue()
        self._epoch: Epoch | None = None

    @property
    def is_expecting(self) -> bool:
        """Whether a version is expected that has neither come nor failed."""
        return self._expected is not None

    def expect(self, version: PolicyVersion | None) -> None:
        """Collect messages about this version from now on; None = collect none."""
        self._expected = version
        self._inbox = asyncio.Queue()

    def on_message(self, message: EpochMessage) -> None:
        """Process a message of the publisher. An invitation at a wrong time is declined."""
        if message.version == self._expected:
            self._inbox.put_nowait(message)
        elif isinstance(message, Epoch):
            self._post(
                WeightGroupFault(message.number, message.version, "not waiting for this version")
            )

    def can_fetch(self, wanted: Announce | VersionReplaced) -> bool:
        """Return whether an epoch of this version is expected."""
        return wanted.manifest.version == self._expected

    async def fetch(self, wanted: Announce | VersionReplaced, file: StagingFile) -> bool:
        """Receive the expected version. False: `file` has a mixture of versions.

        After a failure the group is left, and the publisher is told why.
        """
        version = wanted.manifest.version
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(wanted.manifest, file)
        except (TimeoutError, WeightsError) as error:
            self._decline(version, str(error) or f"no success within {self._timeout_s:g} s")
            return False
        except asyncio.CancelledError:
            self._decline(version, "overtaken by a newer version")
            raise
        finally:
            if self._expected == version:
                self._expected = None
        self._counters.broadcasts += 1
        return True

    def leave_group(self) -> None:
        """Leave the group without waiting for it."""
        self._place.leave_group()
        self._epoch = None

    async def _follow(self, manifest: WeightManifest, file: StagingFile) -> None:
        while True:
            match await self._inbox.get():
                case Epoch() as epoch:
                    self._epoch = epoch
                    await self._place.enter(epoch)
                    held, base = self._updates.held, self._updates.base
                    self._post(Ready(epoch.number, epoch.version, held, base))
                case Send() as send:
                    await self._take(send, manifest, file)
                    self._post(Ack(send.epoch, send.version, manifest.digest))
                    return
                case Abort() as abort:
                    raise WeightsError(f"the publisher ended this weight epoch: {abort.reason}")

    async def _take(self, send: Send, manifest: WeightManifest, file: StagingFile) -> None:
        """Fill a file with a version, in the form in which it comes.

        Raises:
            WeightsError: The version did not arrive, or has another digest.
        """
        if not send.links:
            digest = await self._receive(file)
            if digest != manifest.digest:
                raise WeightsError(f"digest must be {manifest.digest}, got {digest}")
            return
        base_bytes = manifest.num_bytes if send.has_base else 0
        arrived = self._files.create(base_bytes + sum(link.num_bytes for link in send.links))
        try:
            await self._receive(arrived)
        finally:
            self._files.discard(arrived)  # its memory stays
        if send.links[0].base == BASE:
            is_right = await self._add_adapter(arrived.memory, base_bytes, manifest, file)
        else:
            is_right = await self._add_changes(arrived.memory, send.links, manifest, file)
        if not is_right:
            raise WeightsError("an update must produce the announced version, got other weights")

    async def _add_adapter(
        self, arrived: mmap.mmap, base_bytes: int, manifest: WeightManifest, file: StagingFile
    ) -> bool:
        """Fill a file from an adapter and its base, which may precede it in `arrived`."""
        assert manifest.adapter is not None
        digest = manifest.adapter.base
        if self._updates.base != digest:
            base = memoryview(arrived)[:base_bytes]
            if not await self._updates.keep_base(digest, base):
                return False
        return await self._updates.add_adapter(arrived[base_bytes:], manifest, file.memory)

    async def _add_changes(
        self,
        arrived: mmap.mmap,
        links: Sequence[SparseLink],
        manifest: WeightManifest,
        file: StagingFile,
    ) -> bool:
        """Fill a file from the updates since the version that is held here."""
        chain = self._updates.chain_to(manifest, links)
        at = len(arrived) - sum(link.num_bytes for link in chain)
        changes = []
        for link in chain:
            changes.append(arrived[at : at + link.num_bytes])
            at += link.num_bytes
        return bool(chain) and await self._updates.add_changes(changes, manifest, file.memory)

    async def _receive(self, file: StagingFile) -> str:
        """Fill a file with the bytes that the group sends; return their digest."""
        if self._epoch is None:
            raise WeightsError("SEND must follow EPOCH, got SEND without one")
        arriving = asyncio.create_task(self._place.receive(file.path, file.memory))
        interrupt = asyncio.create_task(self._inbox.get())
        try:
            both: list[asyncio.Future[Any]] = [arriving, interrupt]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                raise WeightsError("the publisher ended this weight epoch during the broadcast")
            digest: str = arriving.result()
        except RuntimeError as error:  # torch's only class for a collective that failed
            raise WeightsError(f"the broadcast failed: {error}") from error
        finally:
            interrupt.cancel()
            arriving.cancel()
        self._counters.group_bytes += len(file.memory)
        return digest

    def _decline(self, version: PolicyVersion, reason: str) -> None:
        number = self._epoch.number if self._epoch is not None else 0
        log.warning("weight epoch left", epoch=number, reason=reason)
        self.leave_group()
        self._post(WeightGroupFault(number, version, reason))
