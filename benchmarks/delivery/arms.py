"""The receiving side of each arm, and the CPU time of all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis
import zmq

from benchmarks.delivery.records import BATCH, RECORD_BYTES, Records
from benchmarks.delivery.ring import ring
from benchmarks.delivery.sources import BARE_ACTOR, BARE_ENDPOINT, PAUSE_S, QUEUE, wait_until
from benchmarks.support.machine import ProcessTree
from benchmarks.support.workload import environment
from broker.transport.keys import make_client, make_keys
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from console.run.redis_server import configure, wait_until_ready

MEMORY_MB = 2048
GROUP, CONSUMER = "learners", "learner"
BLOCK_MS = 1000
WARM_UP_S = 1.5
REVERB_LIMIT_S = 120.0

STALLED_S = 30.0  # without a record an arm has failed: its sender has ended, and said why

Batches = Iterator[list[bytes]]
"""What an arm receives; an empty batch now and then while there is nothing."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one arm did in its window."""

    episodes: int
    wall_s: float
    cpu_s: float
    """Of all processes of the arm: sender, servers, receiver."""
    cpu_s_by_process: dict[str, float]

    def shown(self) -> dict[str, Any]:
        """Return them with the rates."""
        return {
            "episodes_per_cpu_s": round(self.episodes / self.cpu_s, 1),
            "episodes_per_s": round(self.episodes / self.wall_s, 1),
            **asdict(self),
        }


def measure(batches: Batches, window_s: float) -> Figures:
    """Receive for a while and count; an arm that loses, doubles or cuts a record is an error."""
    tree, records = ProcessTree(os.getpid()), Records()
    _receive(batches, records, WARM_UP_S)
    before, began = tree.look(), time.monotonic()
    episodes = _receive(batches, records, window_s)
    used, wall_s = tree.look() - before, time.monotonic() - began
    by_process = {name: ms / 1e3 for name, ms in used.most_common()}
    return Figures(episodes, round(wall_s, 3), used.total() / 1e3, by_process)


def _receive(batches: Batches, records: Records, seconds: float) -> int:
    seen: set[int] = set()
    began = heard = time.monotonic()
    count = 0
    while (now := time.monotonic()) < began + seconds or not count:
        batch = next(batches)
        if batch:
            heard = now
        elif now > heard + STALLED_S:
            raise RuntimeError(f"records must come, got none for {STALLED_S:g} s")
        assert all(len(record) == RECORD_BYTES for record in batch)
        seen.update(map(records.task_of, batch))
        count += len(batch)
    assert len(seen) == count, f"every record must come once, got {count - len(seen)} again"
    return count


@contextmanager
def raw_zeromq(_: Path) -> Iterator[Batches]:
    """PUSH to PULL over loopback: no acknowledgement, no encryption, no store."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.rcvtimeo = int(1000 * STALLED_S)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with _source("raw_zeromq", f"tcp://127.0.0.1:{port}"):
            yield _pull(socket)


def _pull(socket: zmq.Socket[bytes]) -> Batches:
    while True:
        yield [socket.recv() for _ in range(BATCH)]


@contextmanager
def redis_pipelines(folder: Path) -> Iterator[Batches]:
    """RPUSH and LPOP in pipelines: what the receiver had in hand when it died is lost."""
    with running_redis(folder) as (client, url_file), _source("redis_pipelines", str(url_file)):
        yield _pop(client)


def _pop(client: redis.Redis) -> Batches:
    while True:
        batch: Any = client.lpop(QUEUE, BATCH)
        yield batch or []
        if not batch:
            time.sleep(PAUSE_S)


@contextmanager
def streams_ack(folder: Path) -> Iterator[Batches]:
    """XADD, XREADGROUP, XACK, and XDEL so that memory stays bounded: at least once, no fences."""
    with running_redis(folder) as (client, url_file):
        client.xgroup_create(QUEUE, GROUP, id="0", mkstream=True)
        with _source("streams_ack", str(url_file)):
            yield _read_group(client)


def _read_group(client: redis.Redis) -> Batches:
    while True:
        streams: Any = client.xreadgroup(GROUP, CONSUMER, {QUEUE: ">"}, count=BATCH, block=BLOCK_MS)
        if not streams:
            yield []
            continue
        for _, entries in streams:
            yield [fields[b"record"] for _, fields in entries]
            ids = [entry for entry, _ in entries]
            pipe = client.pipeline(transaction=False)
            pipe.xack(QUEUE, GROUP, *ids)
            pipe.xdel(QUEUE, *ids)
            pipe.execute()


@contextmanager
def streams_behind_broker(folder: Path) -> Iterator[Batches]:
    """The same stream behind an encrypted broker that only forwards: what any such broker costs."""
    keys = make_keys(folder / "keys")
    make_client(keys, BARE_ACTOR)
    with running_redis(folder) as (client, _):
        client.xgroup_create(QUEUE, GROUP, id="0", mkstream=True)
        with _child("bare_broker", str(folder)):
            wait_until((folder / BARE_ENDPOINT).exists)
            with _source("streams_behind_broker", str(folder)):
                yield _read_group(client)


@contextmanager
def nyala(folder: Path) -> Iterator[Batches]:
    """The whole path: actor, CURVE, broker, store, claim, seal, advance, commit."""
    with ring(folder) as running, _source("nyala", str(running.config)):
        yield running.batches()


@contextmanager
def running_redis(
    folder: Path, *, maxmemory_mb: int = MEMORY_MB
) -> Iterator[tuple[redis.Redis, Path]]:
    """Start a server with the configuration of a run's own."""
    url_file = folder / "redis.url"
    server = configure(folder / "redis", url_file, maxmemory_mb=maxmemory_mb)
    with ExitStack() as stack:
        guard = ProcessGuard(grace_s=5.0)
        stack.callback(guard.close)
        log = folder / "redis.log"
        process = Process(Command("redis", "redis", server.arguments, log, os.environ), guard)
        process.start()
        stack.callback(process.kill)
        wait_until_ready(server.url, has_ended=lambda: process.poll() is not None)
        yield stack.enter_context(redis.Redis.from_url(server.url)), url_file


def _source(arm: str, place: str) -> AbstractContextManager[None]:
    return _child("sources", arm, place)


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", f"benchmarks.delivery.{module}", *arguments]
    process = subprocess.Popen(command, env=environment())
    try:
        yield
    finally:
        process.kill()
        process.wait()


ARMS: dict[str, Callable[[Path], AbstractContextManager[Batches]]] = {
    "raw_zeromq": raw_zeromq,
    "redis_pipelines": redis_pipelines,
    "streams_ack": streams_ack,
    "streams_behind_broker": streams_behind_broker,
    "nyala": nyala,
}
