"""This actor's part in weight epochs: join the group, receive, confirm, or get out.

Consumes EPOCH, SEND and ABORT of the version that was announced; waits for these and, in a thread,
for the collective; a deadline or an ABORT unblocks it. Keeps the group from version to version.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from broker.protocol.manifest import WeightManifest, digest_of
from broker.protocol.weight_messages import Abort, Ack, Epoch, Fault, Ready, Send
from broker.weights.group_thread import GroupThread
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError

if TYPE_CHECKING:
    from .group import ReceivingGroup

log = structlog.get_logger()
EpochMessage = Epoch | Send | Abort


class WeightMember:
    """A member of at most one weight group.

    Args:
        post: Sends a message to the publisher; may lose it.
    """

    def __init__(self, post: Callable[[object], bool]) -> None:
        self._post = post
        self._expected: PolicyVersion | None = None
        self._inbox: asyncio.Queue[EpochMessage] = asyncio.Queue()
        self._epoch: Epoch | None = None
        self._group: GroupThread[ReceivingGroup] | None = None

    def expect(self, version: PolicyVersion) -> None:
        """Collect messages about this version from now on; `receive` follows."""
        self._expected = version
        self._inbox = asyncio.Queue()

    def take(self, message: EpochMessage) -> None:
        """Take a message of the publisher. An invitation that comes at a wrong time is declined."""
        if message.version == self._expected:
            self._inbox.put_nowait(message)
        elif isinstance(message, Epoch):
            self._post(Fault(message.number, message.version, "not waiting for this version"))

    async def receive(
        self, manifest: WeightManifest, memory: mmap.mmap, *, timeout_s: float
    ) -> bool:
        """Fill `memory` by the announced epoch. False: the bytes are a mixture; pull instead."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._follow(manifest, memory)
        except (TimeoutError, WeightsError) as error:
            self._decline(manifest.version, str(error) or f"no success within {timeout_s:g} s")
            return False
        except asyncio.CancelledError:
            self._decline(manifest.version, "overtaken by a newer version")
            raise
        finally:
            if self._expected == manifest.version:
                self._expected = None
        return True

    def leave(self) -> None:
        """Leave the group without waiting for it."""
        if self._group is not None:
            self._group.leave()
        self._group = self._epoch = None

    async def _follow(self, manifest: WeightManifest, memory: mmap.mmap) -> None:
        while True:
            match await self._inbox.get():
                case Epoch() as epoch:
                    self._enter(epoch)
                    self._post(Ready(epoch.number, epoch.version))
                case Send():
                    await self._receive(manifest, memory)
                    return
                case Abort() as abort:
                    raise WeightsError(f"the publisher ended the epoch: {abort.reason}")

    def _enter(self, epoch: Epoch) -> None:
        """Prepare to be in this group; its thread joins when SEND comes."""
        if not epoch.fresh:
            if self._epoch is None or self._epoch.number != epoch.number:
                raise WeightsError(f"weight group {epoch.number} must be one of ours, got no such")
            return
        self.leave()
        self._epoch = epoch
        self._group = GroupThread(lambda: _join(epoch), name=f"weights-{epoch.number}")

    async def _receive(self, manifest: WeightManifest, memory: mmap.mmap) -> None:
        group, epoch = self._group, self._epoch
        if group is None or epoch is None:
            raise WeightsError("SEND must follow EPOCH, got it alone")

        def receive(joined: ReceivingGroup) -> str:
            # While one bucket is digested, the next are on their way.
            return digest_of(
                joined.receive(memory, bucket_bytes=epoch.bucket_bytes, send_s=epoch.send_s)
            )

        arriving = group.call(receive)
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


def _join(epoch: Epoch) -> ReceivingGroup:
    from .group import ReceivingGroup  # torch: not before the first group is there

    return ReceivingGroup(epoch)
