"""An actor with a valid key that sends what no actor of the run can have made."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Hello,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
)
from broker.server.key_watch import KEY_CHECK_S
from broker.transport.allow_list import Role, add
from broker.transport.keys import load_pair, load_public
from buffer.record.codec import encode_completion, encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.errors import RefusedError
from configs.hashes import run_hashes
from configs.loader import load


async def attack(folder: Path) -> list[str]:
    """Lease a task and send a poisoned snapshot and an endless record; return the refusals."""
    settings = load(folder / "config.yaml")
    keys = settings.broker.keys or folder / "keys"
    add(keys, "evil", Role.ACTOR)
    await asyncio.sleep(2 * KEY_CHECK_S + 1)  # the broker follows the folder
    client = BrokerClient(
        settings.broker.endpoint,
        server_key=load_public(keys, "broker"),
        keys=load_pair(keys, "evil"),
        run=settings.run.name,
        incarnation="evil",
    )
    refusals: list[str] = []
    try:
        hello = Hello("evil", host="evil", pid=1, hashes=run_hashes(settings.run), capacity=4)
        await client.hello(hello)
        lease, version = await _lease(client)
        poisoned = encode_completion(_tokens(lease, version, 3, token=10**6))
        beat = Beat(lease.task_id, lease.fence, 0, 3, poisoned)
        try:
            await client.beat(BeatRequest((beat,), version))
        except RefusedError as error:
            refusals.append(str(error))
        record = _record(lease, _tokens(lease, version, 8000, token=5))
        try:
            submission = Submission(lease.task_id, lease.fence, record)
            await client.submit(SubmitRequest((submission,)))
        except RefusedError as error:
            refusals.append(str(error))
        await client.release(ReleaseRequest(((lease.task_id, lease.fence),)))
        await client.bye()
    finally:
        await client.close()
    return refusals


async def _lease(client: BrokerClient) -> tuple[Lease, PolicyVersion]:
    version = PolicyVersion(1, 0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reply = await client.lease(LeaseRequest(1, version))
        if reply.leases:
            return reply.leases[0], version
        if reply.publication is not None:
            version = reply.publication.version
    raise AssertionError("no lease within a minute")


def _tokens(lease: Lease, version: PolicyVersion, tokens: int, *, token: int) -> Completion:
    return Completion(
        token_ids=np.full(tokens, token, np.int32),
        behaviour_logprobs=np.full(tokens, -2.0, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        versions=(VersionSpan(version, 0),),
        fences=(FenceRun(lease.fence, "evil", 0),),
    )


def _record(lease: Lease, completion: Completion) -> bytes:
    return encode_episode(
        Episode(
            task_id=lease.task_id,
            group_id=lease.spec.group_id,
            purpose=lease.spec.purpose,
            prompt_ids=np.array([3, 4], np.int32),
            completion=completion,
            reward=1.0,
            reward_parts={"exact": 1.0},
            finish_reason="stop",
            environment_metrics={},
            incarnation="evil",
            started_at=1.0,
            finished_at=2.0,
        )
    )
