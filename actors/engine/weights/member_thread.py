"""Member of a weight group in this process: a thread joins the group and receives its bytes.

Used where the weights are: in the actor's process if the engine is in it, otherwise in the process
of vLLM's first worker. Steps of the engine go on meanwhile. A group of NCCL is aborted from outside
when it is left, so that no kernel waits on the engine's card for a peer that has gone.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future
from typing import TYPE_CHECKING

from broker.protocol.manifest import digest_of
from broker.protocol.weight_messages import Epoch
from broker.weights.group_thread import GroupThread
from configs.errors import WeightsError

if TYPE_CHECKING:
    from .group import ReceivingGroup

DIGEST_THREADS = {"gloo": 1, "nccl": 4}
"""A core digests 4 GB/s; a card's link brings ten times that, to a machine with cores to spare."""


class MemberThread:
    """A member of at most one group at a time; kept from version to version.

    Args:
        device: Card that a group of NCCL receives on; None = the process's only one.
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._epoch: Epoch | None = None
        self._group: GroupThread[ReceivingGroup] | None = None

    def enter(self, epoch: Epoch) -> None:
        """Prepare to be in this group; it is joined by the first `receive`.

        Raises:
            WeightsError: It is not a new group, and is unknown here.
        """
        if not epoch.fresh and (self._epoch is None or self._epoch.number != epoch.number):
            raise WeightsError(
                f"weight group {epoch.number} must be new or entered already, got neither"
            )
        if epoch.fresh:
            self.leave_group()
            self._group = GroupThread(lambda: self._join(epoch), name=f"weights-{epoch.number}")
        self._epoch = epoch

    def receive(self, memory: mmap.mmap) -> Future[str]:
        """Fill `memory` with the next version; the result is its digest.

        A collective that failed gives the future a RuntimeError, torch's only class for it.

        Raises:
            WeightsError: No group was entered.
        """
        group, epoch = self._group, self._epoch
        if group is None or epoch is None:
            raise WeightsError("SEND must follow EPOCH, got SEND without one")

        def receive(joined: ReceivingGroup) -> str:
            # While one bucket is digested, the next are on their way.
            arriving = joined.receive(memory, bucket_bytes=epoch.bucket_bytes, send_s=epoch.send_s)
            return digest_of(arriving, threads=DIGEST_THREADS[epoch.backend])

        return group.submit(receive)

    def leave_group(self) -> None:
        """Leave the group without waiting for it."""
        if self._group is not None:
            self._group.close_group()
        self._group = self._epoch = None

    def _join(self, epoch: Epoch) -> ReceivingGroup:
        from .group import ReceivingGroup  # noqa: PLC0415 - torch

        return ReceivingGroup(epoch, device=self._device)
