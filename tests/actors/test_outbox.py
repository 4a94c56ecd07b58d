"""The records that one message to the broker carries."""

from __future__ import annotations

import asyncio

from actors.episodes.outbox import BATCH_BYTES, Outbox
from broker.protocol.codec import encode
from broker.protocol.messages import (
    FailRequest,
    Submission,
    SubmitRequest,
    TaskVerdict,
    Verdict,
    Verdicts,
)
from configs.validation.store import RECORD_MARGIN


class Counter:
    """A broker that acknowledges all and notes how large each message was."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.records: list[int] = []

    async def submit(self, request: SubmitRequest, *, deadline_s: float) -> Verdicts:
        self.sizes.append(len(encode(request, run="r", incarnation="a", seq=1)))
        self.records.append(len(request.submissions))
        return Verdicts(
            tuple(TaskVerdict(s.task_id, Verdict.OK) for s in request.submissions), None
        )

    async def fail(self, request: FailRequest, *, deadline_s: float) -> Verdicts:
        raise AssertionError("nothing has failed")


def delivered(sizes: list[int], max_message_bytes: int) -> Counter:
    async def story() -> Counter:
        broker = Counter()
        outbox = Outbox(broker, deadline_s=1, max_message_bytes=max_message_bytes)
        for task_id, size in enumerate(sizes):
            outbox.put_parcel(Submission(task_id, 1, bytes(size)))
        while len(outbox):
            await outbox.deliver()
        return broker

    return asyncio.run(story())


def test_a_message_ends_before_the_record_that_would_make_it_too_long() -> None:
    limit = RECORD_MARGIN + 1000

    broker = delivered([600, 300, 600, 1000, 1, 999], limit)

    assert broker.records == [2, 1, 1, 2]
    assert max(broker.sizes) <= limit


def test_a_long_record_travels_alone_and_not_behind_short_ones() -> None:
    broker = delivered([10, 2 * BATCH_BYTES, 10], 32 * 2**20)

    assert broker.records == [1, 1, 1]
