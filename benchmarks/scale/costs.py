"""CPU time that heartbeats and submissions of such a fleet cost a broker and Redis, measured here.

The broker's is that of decoding, validation and the reply, in this process; encryption and sockets
come on top (`docs/delivery.md`). Redis' is that of a real server, user and system.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.delivery.arms import running_redis
from benchmarks.delivery.redis_cpu import cpu_us
from benchmarks.scale.workload import GROUP_SIZE
from broker.protocol.codec import decode, encode
from broker.protocol.messages import Beat, BeatRequest, TaskVerdict, Verdict, Verdicts
from broker.server.validation import check_beats
from buffer import operations
from buffer.operations.values import BeatLine, LeasedTask, NewTask, SubmitLine
from buffer.record.codec import encode_completion
from buffer.record.episode import Completion, FenceRun, PolicyVersion, VersionSpan
from buffer.record.rules import ANY_RUN
from buffer.store import Store

LINES = 64  # of a heartbeat: the episodes of one actor
TOKENS = 64  # of a line: a second's
ROUNDS = 40
MAX_BYTES = 2**24
TTL_MS = 600_000
ZERO = PolicyVersion(1, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds."""

    broker_line: float
    """Of a heartbeat, for one episode that brings tokens."""
    redis_line: float
    redis_episode: float
    """Of the other operations for an episode, submitted alone with 22 KB."""

    def cores(self, *, lines_per_s: float, episodes_per_s: float) -> dict[str, float]:
        """Return the share of a core that broker and Redis use at these rates."""
        redis = self.redis_line * lines_per_s + self.redis_episode * episodes_per_s
        return {
            "broker_cores": round(self.broker_line * lines_per_s / 1e6, 3),
            "redis_cores": round(redis / 1e6, 3),
        }


def measure_costs(record_bytes: int) -> Costs:
    """Measure on this machine; a few seconds."""
    with (
        TemporaryDirectory(prefix="nyala-scale-") as folder,
        running_redis(Path(folder)) as (client, url_file),
    ):
        store = Store(url_file.read_text().strip(), "costs")
        store.run(
            operations.begin_run(
                "costs",
                {},
                units_per_batch=LINES // GROUP_SIZE,
                max_policy_lag=1,
                margin=1.0,
                group_size=GROUP_SIZE,
                min_group_size=1,
            )
        )
        store.run(operations.begin_lineage(0, 0))
        before_us = cpu_us(client)
        beats_us = 0.0
        for step in range(1, ROUNDS + 1):
            beats_us += _carry(store, step, bytes(record_bytes), lambda: cpu_us(client))
        whole_us = cpu_us(client) - before_us
    count = ROUNDS * LINES
    return Costs(
        broker_line=round(_broker_line_us(), 2),
        redis_line=round(beats_us / count, 2),
        redis_episode=round((whole_us - beats_us) / count, 2),
    )


def _carry(store: Store, step: int, record: bytes, used_us: Callable[[], float]) -> float:
    """Take one actor's episodes through a batch; returns what their heartbeat cost."""
    first = (step - 1) * LINES
    new = [NewTask(task, task // GROUP_SIZE, b"spec" * 10) for task in range(first, first + LINES)]
    store.run(operations.create(1, new))
    version = (1, step - 1)
    leased = store.run(operations.lease("actor", ttl_ms=TTL_MS, n=LINES, version=version)).tasks
    began_us = used_us()
    lines = [BeatLine(t.task_id, t.fence, 0, TOKENS, bytes(9 * TOKENS + 120)) for t in leased]
    store.run(operations.beat(ttl_ms=TTL_MS, lines=lines))
    beats_us = used_us() - began_us
    for task in leased:
        verdicts = store.run(operations.submit([_line(task, record)]))
        assert verdicts == ["OK"]
    store.run(operations.claim(1, step, LINES // GROUP_SIZE))
    store.run(operations.seal(1, step))
    store.run(operations.records([task.task_id for task in leased]))
    store.run(operations.advance(1, step))
    store.run(operations.commit(1, step))
    return beats_us


def _line(task: LeasedTask, record: bytes) -> SubmitLine:
    return SubmitLine(task.task_id, task.fence, record)


def _broker_line_us() -> float:
    completion = Completion(
        token_ids=np.arange(TOKENS, dtype=np.int32),
        behaviour_logprobs=np.full(TOKENS, -1.0, np.float32),
        loss_mask=np.ones(TOKENS, np.uint8),
        versions=(VersionSpan(ZERO, 0),),
        fences=(FenceRun(1, "actor-0", 0),),
    )
    beat = Beat(0, 1, 0, TOKENS, encode_completion(completion))
    beats = tuple(_of(beat, task) for task in range(LINES))
    frame = encode(BeatRequest(beats, ZERO), run="costs", incarnation="actor-0", seq=1)
    verdicts = Verdicts(tuple(TaskVerdict(t, Verdict.OK, TOKENS) for t in range(LINES)), None)
    began = time.process_time()
    for _ in range(ROUNDS):
        message = decode(frame, max_bytes=MAX_BYTES).message
        assert isinstance(message, BeatRequest)
        check_beats(message, max_bytes=MAX_BYTES, limits=ANY_RUN)
        encode(verdicts, run="costs", incarnation="broker", seq=1)
    return 1e6 * (time.process_time() - began) / (ROUNDS * LINES)


def _of(beat: Beat, task: int) -> Beat:
    """Return the line of another task."""
    return Beat(task, beat.fence, beat.offset, beat.num_tokens, beat.chunk)
