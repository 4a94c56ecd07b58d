"""Lies of an actor with a key: any message that the protocol allows, about any task.

The actor leases tasks, and then beats, submits, releases and fails. It uses its own fences, fences
next to them, and fences from the chunks of tasks that it resumes, for tasks of others and for
missing ones. It sends tokens that were not sampled, impossible tokens, a name for each token,
random bytes, invented failures, and repeated requests. `lying_actor.py` sends them to a live
broker, and simulations use them too; all choices come from one generator.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    FailRequest,
    Failure,
    Figures,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
    Verdicts,
)
from buffer.record.codec import decode_completion, encode_completion, encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.errors import RecordError

PATIENCE_S = 5.0
REMEMBERED = 50  # leases
TOKENS = 12  # fewer than in any vocabulary
IMPOSSIBLE = 10**6
LONG_NAME = "x" * 200
RARELY, OFTEN = 0.1, 0.3
FIRST = PolicyVersion(1, 0)

Request: TypeAlias = LeaseRequest | BeatRequest | SubmitRequest | ReleaseRequest | FailRequest


@dataclass
class ForgedRequests:
    """Chooses the next requests of one incarnation."""

    rng: random.Random
    incarnation: str
    group_size: int
    at_most: int
    """Most tasks of one lease."""
    prompt_of: Callable[[int], Sequence[int]]
    """Token ids of a group's prompt."""
    version: PolicyVersion = FIRST
    """The version that was published last."""
    leases: list[Lease] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Resumed tasks with the fences in their chunks, which are those of earlier holders."""
    sent: list[Request] = field(default_factory=list)

    def next(self) -> list[Request]:
        """Return requests to send one after the other; none where a lie needs a lease first."""
        lies = (
            *(self._lease, self._beat, self._beat, self._submit, self._submit, self._release),
            *(self._fail, self._send_again, self._spoil, self._pad),
        )
        requests = self.rng.choice(lies)()
        self.sent = [*self.sent, *requests][-20:]
        return requests

    def hear(self, reply: LeaseReply) -> None:
        """Remember granted leases, and the fences of other actors in them."""
        self.leases = [*self.leases, *reply.leases][-REMEMBERED:]
        self.seen = [*self.seen, *(f for lease in reply.leases for f in _fences_in(lease))][-20:]
        if reply.publication is not None:
            self.version = reply.publication.version

    def _lease(self) -> list[Request]:
        # Half of the requests are for weights that are not published: honest actors take all work
        # of new weights first.
        ahead = self.rng.choice([0, 0, 0, 1, 2, 5])
        version = self.version._replace(step=self.version.step + ahead)
        return [LeaseRequest(self.rng.randint(1, self.at_most), version)]

    def _beat(self) -> list[Request]:
        beats = []
        for task, fence in self._targets():
            tokens = self.rng.randint(0, 6)
            chunk = self._chunk(fence, tokens) if tokens else b""
            beats.append(Beat(task, fence, self.rng.choice([0, 0, 3, 40]), tokens, chunk))
        figures = Figures(tokens_per_s=self.rng.choice([0.0, -1.0, 1e300]))
        return [BeatRequest(tuple(beats), self.version, figures)]

    def _submit(self) -> list[Request]:
        rows = [Submission(t, f, self._record(t, f)) for t, f in self._targets()]
        return [SubmitRequest(tuple(rows))]

    def _release(self) -> list[Request]:
        return [ReleaseRequest(tuple(self._targets()))]

    def _fail(self) -> list[Request]:
        rows = [
            Failure(t, f, "data" if self.rng.random() < 1 / 2 else "infrastructure", "\x1b[2J")
            for t, f in self._targets()
        ]
        return [FailRequest(tuple(rows))]

    def _send_again(self) -> list[Request]:
        """Repeat an earlier request, however old."""
        return [self.rng.choice(self.sent)] if self.sent else []

    def _spoil(self) -> list[Request]:
        """Send tokens whose fences decrease, which no actor can continue, and release the lease."""
        if not self.leases:
            return []
        lease = self.rng.choice(self.leases)
        return [
            self._chunk_of(lease, lease.length, self._completion(lease.fence, 3)),
            self._chunk_of(lease, lease.length + 3, self._completion(lease.fence - 1, 3)),
            ReleaseRequest(((lease.task_id, lease.fence),)),
        ]

    def _pad(self) -> list[Request]:
        """Send a long name for each token, in bytes that almost fill a task, and release the lease.

        The bytes come in one chunk, or in several chunks that are valid one by one.
        """
        if not self.leases:
            return []
        lease, requests = self.rng.choice(self.leases), list[Request]()
        count, tokens = self.rng.choice([(1, 5), (1, 25), (1, 100), (8, 3), (30, 1)])
        for i in range(count):
            invented = self._completion(lease.fence, tokens)
            names = tuple(FenceRun(lease.fence, LONG_NAME[j % 2 :], j) for j in range(tokens))
            padded = Completion(
                token_ids=invented.token_ids,
                behaviour_logprobs=invented.behaviour_logprobs,
                loss_mask=invented.loss_mask,
                versions=invented.versions,
                fences=names,
            )
            requests.append(self._chunk_of(lease, lease.length + i * tokens, padded))
        return [*requests, ReleaseRequest(((lease.task_id, lease.fence),))]

    def _chunk_of(self, lease: Lease, offset: int, completion: Completion) -> BeatRequest:
        tokens = len(completion.token_ids)
        beat = Beat(lease.task_id, lease.fence, offset, tokens, encode_completion(completion))
        return BeatRequest((beat,), self.version)

    def _targets(self) -> list[tuple[int, int]]:
        """Return its own leases, a third of them under another fence or for another task.

        Tasks that were leased together have one fence, so the fence of a resumed task is also tried
        on neighbouring tasks.
        """
        rng, targets = self.rng, list[tuple[int, int]]()
        if self.seen and rng.random() < OFTEN:
            task, fence = rng.choice(self.seen)
            return [(other, fence) for other in range(max(0, task - 4), task + 5)]
        for lease in rng.sample(self.leases, min(len(self.leases), rng.randint(1, 4))):
            task, fence = lease.task_id, lease.fence
            if rng.random() < OFTEN:
                task = max(0, task + rng.randint(-8, 8))
                fence = max(0, fence + rng.choice([0, 0, 1, -1, rng.randint(-(10**6), 10**6)]))
            targets.append((task, fence))
        return targets or [(rng.randrange(50), 1_800_000_000_000_000 + rng.randrange(10**8))]

    def _chunk(self, fence: int, tokens: int) -> bytes:
        if self.rng.random() < RARELY:
            return self.rng.randbytes(20)
        return encode_completion(self._completion(fence, tokens))

    def _completion(self, fence: int, tokens: int) -> Completion:
        ids = [self.rng.randrange(TOKENS) for _ in range(tokens)]
        if self.rng.random() < RARELY:
            ids[0] = IMPOSSIBLE
        return Completion(
            token_ids=np.array(ids, np.int32),
            behaviour_logprobs=np.full(tokens, -self.rng.random(), np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(VersionSpan(self.version, 0),),
            fences=(FenceRun(fence, self.rng.choice([self.incarnation, "other", LONG_NAME]), 0),),
        )

    def _record(self, task: int, fence: int) -> bytes:
        rng, marked = self.rng, 7.25
        if rng.random() < RARELY:
            return rng.randbytes(50)
        group = task // self.group_size
        record = encode_episode(
            Episode(
                task_id=task,
                group_id=group,
                purpose="train",
                prompt_ids=np.array(self.prompt_of(group), np.int32),
                completion=self._completion(fence, rng.choice([1, 5, 20, 60, 8000])),
                reward=rng.choice([0.0, 1.0, 1e9, marked]),
                reward_parts={},
                finish_reason="stop",
                environment_metrics={},
                incarnation=self.incarnation,
                started_at=0.0,
                finished_at=1.0,
                metadata={},
            )
        )  # `encode_episode` refuses NaN, so it is written into the bytes
        return record.replace(struct.pack(">d", marked), struct.pack(">d", math.nan))


def targets_of(request: Request) -> list[tuple[int, int]]:
    """List the tasks and fences of the verdicts of an answer, in their order."""
    match request:
        case BeatRequest():
            return [(beat.task_id, beat.fence) for beat in request.beats]
        case SubmitRequest():
            return [(row.task_id, row.fence) for row in request.submissions]
        case FailRequest():
            return [(row.task_id, row.fence) for row in request.failures]
        case ReleaseRequest():
            return list(request.tasks)
        case LeaseRequest():
            return []


async def ask(client: BrokerClient, request: Request) -> LeaseReply | Verdicts:
    """Send a request and return its answer, within 5 s; raises as the client does."""
    match request:
        case LeaseRequest():
            return await client.lease(request, deadline_s=PATIENCE_S)
        case BeatRequest():
            return await client.beat(request, deadline_s=PATIENCE_S)
        case SubmitRequest():
            return await client.submit(request, deadline_s=PATIENCE_S)
        case ReleaseRequest():
            return await client.release(request, deadline_s=PATIENCE_S)
        case FailRequest():
            return await client.fail(request, deadline_s=PATIENCE_S)


def _fences_in(lease: Lease) -> list[tuple[int, int]]:
    """Return the task with each fence in its chunks."""
    try:
        runs = [run for chunk in lease.chunks for run in decode_completion(chunk).fences]
    except RecordError:  # of another liar
        return []
    return [(lease.task_id, run.fence) for run in runs]
