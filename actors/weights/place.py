"""The place in which this actor is a member of weight groups: its own process, or a worker's."""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path
from typing import Protocol

from actors.engine.weights.member_thread import MemberThread
from broker.protocol.weight_messages import Epoch


class MemberPlace(Protocol):
    """The process that joins groups, called from the actor's event loop, which it never blocks."""

    @property
    def is_open(self) -> bool:
        """Whether a group could be joined in this place now."""
        ...

    async def run(self) -> None:
        """Keep the place open until cancelled, or until its process has ended."""
        ...

    async def enter(self, epoch: Epoch) -> None:
        """Prepare to be in this group, in place of any other.

        Raises:
            WeightsError: The group cannot be joined.
        """
        ...

    async def receive(self, path: Path, memory: mmap.mmap) -> str:
        """Fill the file at `path`, which is mapped as `memory`; return its digest.

        Raises:
            WeightsError: The broadcast failed, or the place is gone: the bytes are a mixture.
            RuntimeError: The broadcast failed in this process, where torch has no other class.
        """
        ...

    def leave_group(self) -> None:
        """Leave the group without waiting for it."""
        ...


class OwnProcess:
    """The actor's own process, if the engine runs in it."""

    def __init__(self) -> None:
        self.is_open = True
        self._member = MemberThread()

    async def run(self) -> None:
        """Do nothing: this place is always open."""

    async def enter(self, epoch: Epoch) -> None:
        """Prepare to be in this group, in place of any other; raises as `MemberPlace.enter`."""
        self._member.enter(epoch)

    async def receive(self, path: Path, memory: mmap.mmap) -> str:  # noqa: ARG002 - it is mapped
        """Fill `memory` in a thread; raises as `MemberPlace.receive`."""
        return await asyncio.wrap_future(self._member.receive(memory))

    def leave_group(self) -> None:
        """Leave the group without waiting for it."""
        self._member.leave_group()
