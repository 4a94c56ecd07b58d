"""The sending side of each arm: a process of its own that runs until it is ended.

    python -m benchmarks.delivery.sources raw_zeromq tcp://...
    python -m benchmarks.delivery.sources redis_pipelines redis.url
    python -m benchmarks.delivery.sources streams_ack redis.url
    python -m benchmarks.delivery.sources streams_behind_broker FOLDER
    python -m benchmarks.delivery.sources nyala run/config.yaml

Each sends in batches of `BATCH` and stops for a while when the other side is behind, so that no arm
measures how fast a queue can grow.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import redis
import uvloop
import zmq

from benchmarks.delivery.records import BATCH, NEWEST, Records
from broker.client import BrokerClient
from broker.protocol.messages import Hello, Lease, LeaseRequest, Submission, SubmitRequest, Verdict
from broker.transport.keys import load_pair, load_public, make_client
from configs.hashes import run_hashes
from configs.loader import load
from configs.settings import Settings

QUEUE = "records"
MOST_WAITING = 16 * BATCH
PAUSE_S = 0.002
BARE_RUN, BARE_ACTOR = "bare", "actor-0"
BARE_ENDPOINT = "broker.endpoint"
"""File in which the broker that only forwards names its address."""
NO_FENCE = 1
WORKERS = 4  # batches under way at once: a fleet keeps the broker busy, one actor would wait for it


def push(endpoint: str) -> None:
    """Send each record as a message of its own; ZeroMQ holds us back."""
    context = zmq.Context()
    with context.socket(zmq.PUSH) as socket:
        socket.connect(endpoint)
        for batch in Records().batches():
            for record in batch:
                socket.send(record)


def append(url_file: str) -> None:
    """Append to a list, a pipeline for each batch."""
    with _redis(url_file) as client:
        for batch in Records().batches():
            pipe = client.pipeline(transaction=False)
            for record in batch:
                pipe.rpush(QUEUE, record)
            if pipe.execute()[-1] > MOST_WAITING:
                wait_until(lambda: client.llen(QUEUE) < MOST_WAITING)


def add(url_file: str) -> None:
    """Add to a stream, a pipeline for each batch."""
    with _redis(url_file) as client:
        for batch in Records().batches():
            pipe = client.pipeline(transaction=False)
            for record in batch:
                pipe.xadd(QUEUE, {"record": record})
            pipe.xlen(QUEUE)
            if pipe.execute()[-1] > MOST_WAITING:
                wait_until(lambda: client.xlen(QUEUE) < MOST_WAITING)


def hand_over(folder: str) -> None:
    """Send to the broker that only forwards (`bare_broker.py`)."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_hand_over(Path(folder)))


async def _hand_over(folder: Path) -> None:
    client = BrokerClient(
        (folder / BARE_ENDPOINT).read_text(),
        server_key=load_public(folder / "keys", "broker"),
        keys=load_pair(folder / "keys", BARE_ACTOR),
        run=BARE_RUN,
        incarnation=BARE_ACTOR,
    )
    batches = Records().batches()

    async def work(records: Records) -> None:
        for batch in batches:
            parcels = tuple(Submission(records.task_of(x), NO_FENCE, x) for x in batch)
            await client.submit(SubmitRequest(parcels))

    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work(Records()))


def act(config: str) -> None:
    """Lease tasks and submit their records as an actor does, without an engine in between."""
    settings = load(Path(config))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_act(settings))


async def _act(settings: Settings) -> None:
    client = connect(settings, "actor-0")
    await client.hello(greeting(settings, "actor-0", capacity=BATCH * WORKERS))
    records = Records()
    # One asks for leases, as in an actor: of two requests at once the broker heeds the newer.
    asking = asyncio.Lock()
    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(_work(client, records, asking))


async def _work(client: BrokerClient, records: Records, asking: asyncio.Lock) -> None:
    for _ in count():
        async with asking:
            reply = await client.lease(LeaseRequest(BATCH, NEWEST))
        if reply.leases:
            await submit(client, records, reply.leases)


async def submit(client: BrokerClient, records: Records, leases: Iterable[Lease]) -> None:
    """Hand in the records of leased tasks and see that they were taken."""
    parcels = tuple(Submission(x.task_id, x.fence, records.of(x.task_id)) for x in leases)
    reply = await client.submit(SubmitRequest(parcels))
    assert all(line.verdict in (Verdict.OK, Verdict.DUP) for line in reply.verdicts)


def connect(settings: Settings, incarnation: str) -> BrokerClient:
    """Connect as an actor of the run."""
    keys = settings.run.folder / "keys"
    make_client(keys, incarnation)
    return BrokerClient(
        settings.broker.endpoint,
        server_key=load_public(keys, "broker"),
        keys=load_pair(keys, incarnation),
        run=settings.run.name,
        incarnation=incarnation,
    )


def greeting(settings: Settings, incarnation: str, *, capacity: int) -> Hello:
    """Return the HELLO of an actor of the run."""
    hashes = run_hashes(settings.run)
    return Hello(incarnation, host="here", pid=os.getpid(), hashes=hashes, capacity=capacity)


def _redis(url_file: str) -> redis.Redis:
    return redis.Redis.from_url(Path(url_file).read_text(encoding="utf-8").strip())


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look every two milliseconds."""
    while not is_so():
        time.sleep(PAUSE_S)


SOURCES = {
    "raw_zeromq": push,
    "redis_pipelines": append,
    "streams_ack": add,
    "streams_behind_broker": hand_over,
    "nyala": act,
}

if __name__ == "__main__":
    SOURCES[sys.argv[1]](sys.argv[2])
