"""A broker in the test's own event loop, on a free loopback port, over the session's real Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import zmq
import zmq.asyncio

from broker.client import BrokerClient
from broker.protocol.codec import encode, encode_spec
from broker.protocol.messages import BeatRequest, Hello, Lease, LeaseRequest, TaskSpec
from broker.server.dispatch import BrokerComponents
from broker.server.server import Broker
from broker.transport.keys import KeyPair, load_pair, load_public, make_client
from broker.transport.sockets import connect_dealer
from buffer import operations
from buffer.operations.values import ActorSeen, NewTask, Stats
from buffer.record.episode import PolicyVersion
from buffer.store import AsyncStore
from configs.settings import (
    ActorSettings,
    AlgorithmSettings,
    BrokerSettings,
    BufferSettings,
    RunSettings,
    Settings,
)
from configs.tables.environments import OneEnvironment
from tests.waiting import until

RUN = "test"
GROUP = 2
HASHES = {"settings": "s1", "environment": "e1", "reward": "r1"}
FIRST = PolicyVersion(1, 0)


def settings_with(
    *,
    pause_at_memory: float = 0.8,
    object_store: str | None = None,
    max_run_bytes: int | None = None,
    max_prompt_tokens: int = 1024,
    max_completion_tokens: int = 1024,
    max_episode_bytes: int = 2**18,
    environment: str = "reasoning_gym",
    environments: tuple[OneEnvironment, ...] = (),
    teacher: str | dict[str, str] | None = None,
    **broker: Any,
) -> Settings:
    defaults: dict[str, Any] = {
        "endpoint": "tcp://127.0.0.1:0",
        "long_poll_s": 0.3,
        "max_message_bytes": 2**20,
    }
    settings = Settings(
        run=RunSettings(
            name=RUN,
            model="init",
            environment=environment,
            environments=environments,
            group_size=GROUP,
            groups_per_batch=2,
        ),
        buffer=BufferSettings(
            max_episode_bytes=max_episode_bytes,
            pause_at_memory=pause_at_memory,
            max_uncommitted_bytes=2**20,
            object_store=object_store,
            inline_bytes=1024,
        ),
        broker=BrokerSettings(**{**defaults, **broker}),
        actors=ActorSettings(heartbeat_s=0.1),
        algorithm=AlgorithmSettings(
            teacher=teacher, teacher_in="learner" if teacher is None else "actor"
        ),
    )
    # Also ones that settings may not have.
    buffer = settings.buffer.model_copy(update={"max_run_bytes": max_run_bytes})
    run = settings.run.model_copy(
        update={
            "max_prompt_tokens": max_prompt_tokens,
            "max_completion_tokens": max_completion_tokens,
        }
    )
    return settings.model_copy(update={"run": run, "buffer": buffer})


def spec_of(task_id: int) -> TaskSpec:
    group = task_id // GROUP
    return TaskSpec(group, index=group, seed=task_id, purpose="train", temperature=1.0)


async def begin(
    store: AsyncStore, *, groups: int, units_per_batch: int = 100, vocabulary: int | None = None
) -> None:
    """Enter the run and create its first groups."""
    await store.run(
        operations.begin_run(
            "config",
            HASHES,
            units_per_batch=units_per_batch,
            max_policy_lag=0,
            margin=1.0,
            group_size=GROUP,
            min_group_size=1,
            vocabulary=vocabulary,
        )
    )
    await store.run(operations.begin_lineage(0, 0))
    await create(store, range(groups))


async def create(store: AsyncStore, groups: range) -> None:
    tasks = [
        NewTask(task_id, group, encode_spec(spec_of(task_id)))
        for group in groups
        for task_id in range(group * GROUP, group * GROUP + GROUP)
    ]
    if tasks:
        await store.run(operations.create(1, tasks))


def hello(incarnation: str, capacity: int = 64, teacher: str = "", **changes: str) -> Hello:
    hashes = {**HASHES, **changes}
    return Hello(incarnation, "here", pid=1, hashes=hashes, capacity=capacity, teacher=teacher)


def pair_of(folder: Path, name: str) -> KeyPair:
    """The key pair of an actor, made and allowed at first use."""
    if not (folder / f"{name}.key").exists():
        make_client(folder, name)
    return load_pair(folder, name)


@dataclass
class Ring:
    """A broker's address and store, and clients that are closed with it."""

    store: AsyncStore
    endpoint: str
    keys: Path
    broker: Broker | None = None
    """The broker itself, where it serves in this loop."""
    clients: list[BrokerClient] = field(default_factory=list)

    @property
    def parts(self) -> BrokerComponents:
        """What the broker is made of."""
        assert self.broker is not None
        return self.broker.parts

    def client(self, incarnation: str = "actor-1", **changes: Any) -> BrokerClient:
        """A client under a key of its own, whose name is that of the incarnation."""
        options: dict[str, Any] = {
            "server_key": load_public(self.keys, "broker"),
            "keys": changes.pop("keys", None) or pair_of(self.keys, incarnation),
            "run": RUN,
            "incarnation": incarnation,
        }
        endpoint = changes.pop("endpoint", self.endpoint)
        client = BrokerClient(endpoint, **{**options, **changes})
        self.clients.append(client)
        return client

    async def actor(self, incarnation: str = "actor-1", **changes: Any) -> BrokerClient:
        """A client that has said HELLO."""
        client = self.client(incarnation, **changes)
        await client.hello(hello(incarnation), deadline_s=10)
        return client

    async def teacher(self, incarnation: str = "teacher-1", name: str = "teacher") -> BrokerClient:
        """A client that has said HELLO as a teacher of this name."""
        client = self.client(incarnation)
        await client.hello(hello(incarnation, teacher=name), deadline_s=10)
        return client

    @asynccontextmanager
    async def raw_socket(
        self, name: str = "actor-1", *, keys: KeyPair | None = None
    ) -> AsyncIterator[zmq.asyncio.Socket]:
        """A connection under the key of this name, or another, that says what it likes."""
        context = zmq.asyncio.Context()
        socket = connect_dealer(
            context,
            self.endpoint,
            keys=keys or pair_of(self.keys, name),
            server_key=load_public(self.keys, "broker"),
            max_message_bytes=2**20,
        )
        try:
            assert await socket.poll(5000, zmq.POLLOUT)  # type: ignore[call-arg]  # wrong stub
            yield socket
        finally:
            context.destroy(linger=0)

    @asynccontextmanager
    async def raw_actor(self, incarnation: str = "actor-1") -> AsyncIterator[zmq.asyncio.Socket]:
        """A connection that has said HELLO, and then says what it likes."""
        async with self.raw_socket(incarnation) as socket:
            await socket.send(encode(hello(incarnation), run=RUN, incarnation=incarnation, seq=1))
            await asyncio.wait_for(socket.recv(), 5)
            yield socket

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.store.close()


@asynccontextmanager
async def ring(
    redis_url: str, keys: Path, *, audit_file: Any = None, **broker: Any
) -> AsyncIterator[Ring]:
    """Serve until the block ends; an error of the server fails the test."""
    store = AsyncStore(redis_url, RUN)
    server = Broker(settings_with(**broker), store, keys=keys, audit_file=audit_file)
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve(stop, on_ready=address.set_result))
    running = Ring(store, await asyncio.wait_for(address, 5), keys, server)
    try:
        yield running
    finally:
        stop.set()
        await asyncio.wait_for(serving, 10)
        await running.close()


def fingerprint(redis_url: str) -> str:
    """Everything in the store that an actor could change; signs of life are no change."""
    digest = hashlib.sha256()
    with redis.Redis.from_url(redis_url) as client:
        for key in sorted(client.scan_iter()):
            if b":actors" not in key and b":a:" not in key:
                digest.update(key + (client.dump(key) or b""))
    return digest.hexdigest()


async def until_stats(
    here: Ring, holds: Callable[[Stats], bool], *, timeout_s: float = 60.0
) -> Stats:
    """Wait for a state of the run's tasks; returns their numbers."""
    stats: list[Stats] = []

    async def are_agreeable() -> bool:
        stats[:] = [await here.store.run(operations.stats())]
        return holds(stats[0])

    await until(are_agreeable, lambda: f"it stays at {stats[0]}", timeout_s=timeout_s)
    return stats[0]


async def until_parked(here: Ring, number: int = 1) -> None:
    """Wait until this many requests wait in the broker for work."""
    queue = here.parts.leasing.queue
    await until(lambda: len(queue) == number, lambda: f"{len(queue)} wait")


async def until_seen(here: Ring, number: int) -> list[ActorSeen]:
    """Wait until this many actors are in the store; returns them."""

    async def seen() -> list[ActorSeen]:
        actors = await here.store.run(operations.actors())
        return list(actors) if len(actors) == number else []

    return await until(seen)


async def until_granted(client: BrokerClient, max_tasks: int) -> tuple[Lease, ...]:
    """Ask for tasks until the broker grants some; returns their leases."""

    async def granted() -> tuple[Lease, ...]:
        return (await client.lease(LeaseRequest(max_tasks, FIRST))).leases

    return await until(granted)


async def until_refused(client: BrokerClient, *, timeout_s: float = 10.0) -> None:
    """Beat until the broker refuses it, which raises what the broker says."""

    async def beat() -> bool:
        await client.beat(BeatRequest((), FIRST), deadline_s=5)
        return False

    await until(beat, "no beat is refused", timeout_s=timeout_s, every_s=0.05)


async def until_announced(client: BrokerClient, version: PolicyVersion) -> None:
    """Beat until the broker, which reads the store now and then, announces these weights."""

    async def is_announced() -> bool:
        publication = (await client.beat(BeatRequest((), FIRST))).publication
        return publication is not None and publication.version == version

    await until(is_announced)
