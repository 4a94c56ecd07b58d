"""Broadcast of one version to the members of a weight group, with a deadline for everything.

Run by the publisher's server (`server.py`). Consumes READY, ACK and FAULT; waits for members until
the deadlines of `epochs.py`; the last answer, a failure of the group, or the deadline unblocks it.
Actors that lack the version then pull it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from broker.protocol.weight_messages import Abort, Ack, Epoch, Ready, Send, WeightGroupFault
from broker.weights.group_thread import GroupThread
from buffer.record.episode import PolicyVersion
from configs.worker import Worker

from .epochs import EpochPhase, Membership, WeightEpochs
from .memory import WeightSlot
from .updates import BroadcastPayload

if TYPE_CHECKING:
    from .group import SendingGroup

MIN_BUCKET_BYTES = 2**20
"""Below this, the agreement on each bucket takes longer than its bytes."""
MAX_BUCKET_BYTES = 16 * 2**20
"""Full speed; and what is under way stays small beside the model."""
BUCKETS = 16
"""The receiver digests a bucket while the next ones travel; that of the last comes on top."""
STUCK_AFTER_S = 1.0
"""A collective that outlives its own timeout by this much will not return."""
STUCK_EXIT_CODE = 75
"""EX_TEMPFAIL: the learner starts a new publisher."""

log = structlog.get_logger()
Post = Callable[[str, object], None]


@dataclass(frozen=True, slots=True)
class BroadcastSettings:
    """Address and deadlines of groups, from the `learner` table."""

    host: str
    """Address on which the stores of groups listen."""
    join_s: float
    send_s: float
    use_cuda: bool
    ports: tuple[int, int] | None = None
    """First and last port for those stores; None = any free one."""


class Broadcast:
    """Runs the epochs of `WeightEpochs` with real groups.

    Args:
        settings: Deadlines and address.
        epochs: Membership, and the state of the current epoch.
        post: Sends a message to an actor; never blocks, may lose.
        form_for: Chooses the form of a version for members by their answers.
    """

    def __init__(
        self,
        settings: BroadcastSettings,
        epochs: WeightEpochs,
        *,
        post: Post,
        form_for: Callable[[WeightSlot, Collection[Ready]], BroadcastPayload],
    ) -> None:
        self._settings = settings
        self._epochs = epochs
        self._post = post
        self._form_for = form_for
        self._ready: dict[str, Ready] = {}
        self.num_bytes = 0
        """Bytes that each member was sent of the last version."""
        self._changed = asyncio.Event()
        self._group: GroupThread[SendingGroup] | None = None
        self._digest = ""
        self._warming: Worker | None = None
        self._has_torch = False

    def freeze_members(self, version: PolicyVersion) -> Membership | None:
        """Freeze the members for a version; None = every actor pulls it.

        The first call with candidates begins to import torch in a thread. Until it is imported the
        result is None, and for good where it cannot be: the thread logs that, and pulls need no
        torch.
        """
        if self._has_torch:
            return self._epochs.begin_epoch(version)
        if self._warming is None and self._epochs.candidates():  # else it is never needed
            self._warming = Worker(self._import_torch, name="import-torch").start()
        return None

    async def run(self, slot: WeightSlot, membership: Membership) -> bool:
        """Send the slot to these members; False if a member does not have it: such members pull.

        A group that does not form is tried once more without the members that were silent. A
        collective that outlives its deadline ends this process, with `STUCK_EXIT_CODE`.
        """
        self._digest, self.num_bytes = slot.manifest.digest, 0
        if await self._form_group(membership, bucket_bytes_of(slot)):
            return await self._send(slot, membership)
        self._close_group()
        survivors = self._epochs.retry()
        left_out = set(membership.members) - set(survivors.members if survivors else ())
        self._abort(membership, left_out, "not all members were ready")
        if survivors is None or not await self.run(slot, survivors):
            return False
        return not left_out

    def on_answer(self, actor: str, answer: Ready | Ack | WeightGroupFault) -> None:
        """Process a member's answer; one about another version than the present one is ignored."""
        membership = self._epochs.membership
        if membership is None or answer.version != membership.version:
            return
        match answer:
            case Ready():
                self._ready[actor] = answer
                self._epochs.ready(actor, answer.epoch)
            case Ack() if answer.digest == self._digest:
                self._epochs.acked(actor, answer.epoch)
            case Ack() | WeightGroupFault():
                reason = answer.reason if isinstance(answer, WeightGroupFault) else "wrong digest"
                log.warning("weight epoch failed", epoch=answer.epoch, actor=actor, reason=reason)
                self._epochs.broke(answer.epoch)
        self._changed.set()

    async def _form_group(self, membership: Membership, bucket_bytes: int) -> bool:
        """Invite the members and wait until all are ready."""
        self._ready = {}
        port = 0
        if membership.fresh:
            try:
                port = self._open_group(membership)
            except OSError as error:
                log.warning("no weight group, so actors pull", reason=str(error))
                self._epochs.broke(membership.number)
                return False
        for rank, actor in enumerate(membership.members, start=1):
            invitation = Epoch(
                number=membership.number,
                version=membership.version,
                fresh=membership.fresh,
                backend=membership.backend,
                host=self._settings.host,
                port=port,
                rank=rank,
                size=len(membership.members) + 1,
                bucket_bytes=bucket_bytes,
                join_s=self._settings.join_s,
                send_s=self._settings.send_s,
            )
            self._post(actor, invitation)
        await self._wait_out(EpochPhase.FORMING)
        return self._epochs.phase is EpochPhase.SENDING

    async def _send(self, slot: WeightSlot, membership: Membership) -> bool:
        assert self._group is not None
        number = membership.number
        form = self._form_for(slot, self._ready.values())
        for actor in membership.members:
            self._post(actor, Send(number, membership.version, form.links, form.has_base))
        send_s, memory = self._settings.send_s, form.memory
        self.num_bytes = len(memory)
        bucket_bytes = bucket_bytes_of(slot)
        sending = self._group.call(
            lambda group: group.send(memory, bucket_bytes=bucket_bytes, send_s=send_s)
        )
        sending.add_done_callback(lambda done: self._note_send_result(number, done))
        limit_s = self._settings.join_s + send_s + STUCK_AFTER_S
        stuck = asyncio.get_running_loop().call_later(limit_s, _end_stuck_process)
        sending.add_done_callback(lambda _: stuck.cancel())
        await self._wait_out(EpochPhase.SENDING)
        if self._epochs.phase is EpochPhase.DONE:
            return True
        self._close_group()
        self._abort(membership, membership.members, "not all members confirmed")
        return False

    def _note_send_result(self, number: int, sending: asyncio.Future[None]) -> None:
        """Note a failure of the collective. Its success is no proof of receipt: acks are."""
        error = None if sending.cancelled() else sending.exception()
        if error is not None:
            log.warning("weight broadcast failed", epoch=number, reason=str(error))
            self._epochs.broke(number)
            self._changed.set()

    async def _wait_out(self, phase: EpochPhase) -> None:
        """Wait until the phase has changed, by an answer or by its deadline."""
        loop = asyncio.get_running_loop()
        while self._epochs.phase is phase:
            self._changed.clear()
            left_s = self._epochs.deadline - loop.time()
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    await self._changed.wait()
            except TimeoutError:
                silent = self._epochs.expire()
                if silent:
                    log.warning("members are silent", phase=phase.value, actors=silent)

    def _open_group(self, membership: Membership) -> int:
        from .group import GroupPlan, SendingGroup, listen  # noqa: PLC0415 - torch: loaded by `_import_torch`

        self._close_group()
        size = len(membership.members) + 1
        plan = GroupPlan(membership.backend, self._settings.host, size, self._settings.join_s)
        listener = listen(self._settings.host, self._settings.ports)
        self._group = GroupThread(
            lambda: SendingGroup(plan, listener),
            name=f"weights-{membership.number}",
            unused=listener.close,
        )
        return int(listener.getsockname()[1])

    def _abort(self, membership: Membership, actors: Iterable[str], reason: str) -> None:
        for actor in actors:
            self._post(actor, Abort(membership.number, membership.version, reason))

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close_group()
            self._group = None

    def _import_torch(self) -> None:
        """Import torch beside the first pulls: it takes seconds."""
        from . import group as weight_group  # noqa: PLC0415 - torch

        self._epochs.may_nccl = self._settings.use_cuda and weight_group.can_nccl()
        self._has_torch = True


def bucket_bytes_of(slot: WeightSlot) -> int:
    """Return the size of the buckets in which a version travels."""
    return min(max(slot.manifest.num_bytes // BUCKETS, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)


def _end_stuck_process() -> None:
    log.error("a broadcast exceeded its deadline; the publisher is restarted")
    os._exit(STUCK_EXIT_CODE)  # a stuck collective cannot be unwound
