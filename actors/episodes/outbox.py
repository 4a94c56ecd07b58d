"""Finished episodes and failures on their way to the broker, kept until it acknowledges them.

Consumes what `Scoring` puts in; waits for the broker's verdicts; a full outbox stops the leasing,
and with it everything before. A small batch waits a moment for more, since the store writes a batch
in one round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import structlog

from broker.protocol.messages import (
    MAX_REASON,
    FailRequest,
    Failure,
    Submission,
    SubmitRequest,
    TaskVerdict,
    Verdict,
)
from configs.errors import RefusedError
from configs.validation.store import RECORD_MARGIN

from .interfaces import DeliveryClient

BATCH = 64
BATCH_BYTES = 4 * 2**20  # a longer message would keep a heartbeat waiting behind it
LINGER_S = 0.05

log = structlog.get_logger()

Parcel = Submission | Failure


class Outbox:
    """Parcels that are not acknowledged yet."""

    def __init__(
        self, broker: DeliveryClient, *, deadline_s: float, max_message_bytes: int
    ) -> None:
        self._broker = broker
        self._batch_bytes = min(BATCH_BYTES, max_message_bytes - RECORD_MARGIN)
        self._deadline_s = deadline_s
        self._waiting: deque[Parcel] = deque()
        self._num_sent = 0
        self._filled = asyncio.Event()
        self._acked = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + self._num_sent

    def put_parcel(self, parcel: Parcel) -> None:
        """Take a parcel to deliver."""
        self._waiting.append(parcel)
        self._filled.set()

    async def until_below(self, limit: int) -> None:
        """Wait until fewer parcels than this are unacknowledged."""
        while len(self) >= limit:
            self._acked.clear()
            await self._acked.wait()

    async def deliver(self) -> list[tuple[Parcel, TaskVerdict]]:
        """Wait for parcels, send a batch of them, and return the broker's verdicts.

        A record that the broker refuses counts as taken, and a failure of its task follows it.

        Raises:
            DeadlineError: The broker does not answer; the batch waits for the next call.
            RefusedError: The broker refuses failures, which are then kept as well.
        """
        await self._filled.wait()
        if len(self._waiting) < BATCH:
            await asyncio.sleep(LINGER_S)
        parcels = self._next_batch()
        try:
            return await self._send(parcels)
        except BaseException:
            self._waiting.extendleft(reversed(parcels))  # for another try, and for `len`
            raise
        finally:
            self._num_sent = 0
            self._acked.set()
            if not self._waiting:
                self._filled.clear()

    def _next_batch(self) -> list[Parcel]:
        parcels: list[Parcel] = []
        size = 0
        while self._waiting and len(parcels) < BATCH:
            size += _size(self._waiting[0])
            if parcels and size > self._batch_bytes:
                break
            parcels.append(self._waiting.popleft())
        self._num_sent = len(parcels)
        return parcels

    async def _send(self, parcels: Sequence[Parcel]) -> list[tuple[Parcel, TaskVerdict]]:
        submissions = tuple(p for p in parcels if isinstance(p, Submission))
        failures = tuple(p for p in parcels if isinstance(p, Failure))
        answered: list[tuple[Parcel, TaskVerdict]] = []
        if submissions:
            answered += await self._submit(submissions)
        if failures:
            reply = await self._broker.fail(FailRequest(failures), deadline_s=self._deadline_s)
            answered += zip(failures, reply.verdicts, strict=True)
        return answered

    async def _submit(
        self, submissions: tuple[Submission, ...]
    ) -> list[tuple[Parcel, TaskVerdict]]:
        try:
            request = SubmitRequest(submissions)
            reply = await self._broker.submit(request, deadline_s=self._deadline_s)
        except RefusedError as error:
            if len(submissions) > 1:  # only one of the records may be at fault
                singles = [await self._submit((submission,)) for submission in submissions]
                return [pair for single in singles for pair in single]
            [parcel] = list(submissions)
            log.error("record is refused", task_id=parcel.task_id, reason=str(error))
            self.put_parcel(
                Failure(
                    parcel.task_id, parcel.fence, "data", f"record refused: {error}"[:MAX_REASON]
                )
            )
            return [(parcel, TaskVerdict(parcel.task_id, Verdict.OK))]
        return list(zip(submissions, reply.verdicts, strict=True))


def _size(parcel: Parcel) -> int:
    return len(parcel.record) if isinstance(parcel, Submission) else len(parcel.reason.encode())
