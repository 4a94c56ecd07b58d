"""Transport through a weight group: join it, receive, confirm, or leave it.

Consumes EPOCH, SEND and ABORT of the version that was announced; waits for these and, in a thread,
for the collective; a deadline or an ABORT unblocks it. Keeps the group from version to version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from actors.membership.place import MemberPlace
from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import Abort, Ack, Announce, Epoch, Fault, Moved, Ready, Send
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError

from .counters import WeightCounters
from .staging_files import StagingFile

log = structlog.get_logger()
EpochMessage = Epoch | Send | Abort


class GroupMember:
    """Transport through a weight group; a member of at most one at a time.

    Args:
        post: Sends a message to the publisher; may lose it.
        counters: Counts versions received.
        place: Where groups are joined.
        timeout_s: Time from the announcement to the last byte.
    """

    def __init__(
        self,
        post: Callable[[object], bool],
        counters: WeightCounters,
        *,
        place: MemberPlace,
        timeout_s: float,
    ) -> None:
        self._post = post
        self._place = place
        self._counters = counters
        self._timeout_s = timeout_s
        self._expected: PolicyVersion | None = None
        self._inbox: asyncio.Queue[EpochMessage] = asyncio.Queue()
        self._epoch: Epoch | None = None

    @property
    def is_expecting(self) -> bool:
        """True from `expect` until that version has come or failed to."""
        return self._expected is not None

    def expect(self, version: PolicyVersion | None) -> None:
        """Collect messages about this version from now on; None = about no version."""
        self._expected = version
        self._inbox = asyncio.Queue()

    def on_message(self, message: EpochMessage) -> None:
        """Process a message of the publisher. An invitation at a wrong time is declined."""
        if message.version == self._expected:
            self._inbox.put_nowait(message)
        elif isinstance(message, Epoch):
            self._post(Fault(message.number, message.version, "not waiting for this version"))

    def can_fetch(self, wanted: Announce | Moved) -> bool:
        """Return whether an epoch of this version is expected."""
        return wanted.manifest.version == self._expected

    async def fetch(self, wanted: Announce | Moved, file: StagingFile) -> bool:
        """Receive the expected version. False: `file` holds a mixture."""
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

    def leave(self) -> None:
        """Leave the group without waiting for it."""
        self._place.leave()
        self._epoch = None

    async def _follow(self, manifest: WeightManifest, file: StagingFile) -> None:
        while True:
            match await self._inbox.get():
                case Epoch() as epoch:
                    self._epoch = epoch
                    await self._place.enter(epoch)
                    self._post(Ready(epoch.number, epoch.version))
                case Send():
                    await self._receive(manifest, file)
                    return
                case Abort() as abort:
                    raise WeightsError(f"the publisher ended the epoch: {abort.reason}")

    async def _receive(self, manifest: WeightManifest, file: StagingFile) -> None:
        epoch = self._epoch
        if epoch is None:
            raise WeightsError("SEND must follow EPOCH, got it alone")
        arriving = asyncio.create_task(self._place.receive(file.path, file.memory))
        interrupt = asyncio.create_task(self._inbox.get())
        try:
            both: list[asyncio.Future[Any]] = [arriving, interrupt]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                raise WeightsError("the publisher ended the epoch during the broadcast")
            digest = arriving.result()
        except RuntimeError as error:  # torch's only class for a collective that failed
            raise WeightsError(f"the broadcast failed: {error}") from error
        finally:
            interrupt.cancel()
            arriving.cancel()
        if digest != manifest.digest:
            raise WeightsError(f"digest must be {manifest.digest}, got {digest}")
        self._post(Ack(epoch.number, manifest.version, digest))

    def _decline(self, version: PolicyVersion, reason: str) -> None:
        number = self._epoch.number if self._epoch is not None else 0
        log.warning("weight epoch left", epoch=number, reason=reason)
        self.leave()
        self._post(Fault(number, version, reason))
