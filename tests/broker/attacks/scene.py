"""A small live ring: a real store and broker, honest actors that work, a learner that claims."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq.asyncio

from benchmarks.delivery.records import NEWEST
from benchmarks.delivery.ring import Ring, ring
from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Hello,
    Lease,
    LeaseRequest,
    Submission,
    SubmitRequest,
)
from broker.transport.keys import KeyPair, load_pair, load_public, make_client
from broker.transport.sockets import connect_dealer
from buffer import operations
from buffer.operations.values import Stats
from buffer.record.codec import encode_completion, encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, VersionSpan
from configs.hashes import run_hashes

HONEST = 3
AT_ONCE = 4
EPISODE_S = 0.1
TOKENS = 16
OVERRIDES = (
    "run.groups_per_batch=8",
    "run.max_completion_tokens=1024",
    "buffer.maxmemory_mb=512",
)


def completion(fence: int, tokens: int = TOKENS, name: str = "made") -> Completion:
    """Tokens that an actor of this run can have made."""
    return Completion(
        token_ids=np.ones(tokens, np.int32),
        behaviour_logprobs=np.full(tokens, -1.0, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        versions=(VersionSpan(NEWEST, 0),),
        fences=(FenceRun(fence, name, 0),),
    )


def beat_of(lease: Lease, made: Completion, offset: int = 0) -> BeatRequest:
    """A heartbeat that brings a chunk."""
    chunk, tokens = encode_completion(made), len(made.token_ids)
    return BeatRequest((Beat(lease.task_id, lease.fence, offset, tokens, chunk),), NEWEST)


def submission_of(lease: Lease, made: Completion) -> SubmitRequest:
    """A finished episode."""
    episode = Episode(
        task_id=lease.task_id,
        group_id=lease.spec.group_id,
        purpose=lease.spec.purpose,
        prompt_ids=np.ones(8, np.int32),
        completion=made,
        reward=1.0,
        reward_parts={},
        finish_reason="stop",
        environment_metrics={},
        incarnation="made",
        started_at=1.0,
        finished_at=2.0,
    )
    return SubmitRequest((Submission(lease.task_id, lease.fence, encode_episode(episode)),))


@dataclass
class Scene:
    """What an attack may use, and what is measured."""

    ring: Ring
    granted: int = 0
    """Tasks that the attacker was ever leased."""
    batches: int = 0
    slowest_lease_s: float = 0.0
    """Of the honest actors that were there before."""
    _clients: list[tuple[str, BrokerClient]] = field(default_factory=list)

    @property
    def run(self) -> str:
        return self.ring.settings.run.name

    @property
    def keys(self) -> Path:
        return self.ring.settings.run.folder / "keys"

    def pair(self, name: str) -> KeyPair:
        """The key pair of this name, made and allowed at its first use."""
        if not (self.keys / f"{name}.key").exists():
            make_client(self.keys, name)
        return load_pair(self.keys, name)

    def hello(self, name: str, capacity: int = 64) -> Hello:
        return Hello(name, "here", 1, run_hashes(self.ring.settings.run), capacity)

    async def actor(self, name: str, *, key: str | None = None, capacity: int = 64) -> BrokerClient:
        """A client that has said HELLO, under a key of its own if no other is named."""
        client = BrokerClient(
            self.ring.settings.broker.endpoint,
            server_key=load_public(self.keys, "broker"),
            keys=self.pair(key or name),
            run=self.run,
            incarnation=name,
        )
        self._clients.append((key or name, client))
        await client.hello(self.hello(name, capacity), deadline_s=20)
        return client

    async def leases(self, evil: BrokerClient, n: int) -> tuple[Lease, ...]:
        """Lease for the attacker, and count it."""
        leases = (await evil.lease(LeaseRequest(n, NEWEST), deadline_s=20)).leases
        self.granted += len(leases)
        return leases

    @asynccontextmanager
    async def socket(self, name: str) -> AsyncIterator[zmq.asyncio.Socket]:
        """A connection under the key of this name that says what it likes."""
        context = zmq.asyncio.Context()
        try:
            yield connect_dealer(
                context,
                self.ring.settings.broker.endpoint,
                keys=self.pair(name),
                server_key=load_public(self.keys, "broker"),
                max_message_bytes=2**20,
            )
        finally:
            context.destroy(linger=0)

    def used_memory(self) -> int:
        return int(self.ring.client.info("memory")["used_memory"])

    def stats(self) -> Stats:
        return self.ring.store.run(operations.stats())

    async def learn(self) -> None:
        """Take batches as they become complete."""
        while True:
            if await asyncio.to_thread(self.ring.take) is not None:
                self.batches += 1
            await asyncio.sleep(0.02)

    async def work(self, actor: BrokerClient) -> None:
        """Make episodes, with a snapshot of each."""
        while True:
            began = time.monotonic()
            reply = await actor.lease(LeaseRequest(AT_ONCE, NEWEST), deadline_s=60)
            if reply.leases:
                self.slowest_lease_s = max(self.slowest_lease_s, time.monotonic() - began)
            for lease in reply.leases:
                if not lease.chunks:
                    await actor.beat(beat_of(lease, completion(lease.fence, 4)), deadline_s=60)
            await asyncio.sleep(EPISODE_S * random.uniform(0.5, 1.5))
            for lease in reply.leases:
                await actor.submit(submission_of(lease, completion(lease.fence)), deadline_s=60)

    async def cut(self, name: str) -> None:
        """The end of the processes with this key: the system closes their connections."""
        gone = [client for key, client in self._clients if key == name]
        self._clients = [(key, client) for key, client in self._clients if key != name]
        for client in gone:
            await client.close()

    async def close(self) -> None:
        for _, client in self._clients:
            await client.close()


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """A ring at work; everything ends with the block."""
    with ring(folder, *OVERRIDES) as running:
        here = Scene(running)
        tasks = [asyncio.create_task(here.learn())]
        try:
            for n in range(HONEST):
                actor = await here.actor(f"honest-{n}")
                tasks.append(asyncio.create_task(here.work(actor)))
            yield here
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await here.close()
