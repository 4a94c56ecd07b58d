"""Many simulated actors in one process, and the latency of their LEASE, BEAT and SUBMIT.

    python -m benchmarks.delivery.fleet run/config.yaml --actors 1000 --seconds 60

Each has a CURVE connection of its own and does, without an engine, what an actor with a few long
episodes does: lease, a heartbeat every 2 s that brings the tokens since the last one, submit, lease
again. When all have joined they start, spread over one cycle. A time is from before the request is
encoded until after the reply is decoded, so it includes this process: where it plays hundreds,
their queue in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from benchmarks.delivery.records import NEWEST, Records
from benchmarks.delivery.sources import greeting
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    Submission,
    SubmitRequest,
    Verdict,
    Verdicts,
    Welcome,
)
from broker.transport.keys import load_pair, load_public, make_client
from broker.transport.sockets import connect_dealer
from buffer.record.codec import encode_completion
from buffer.record.episode import Completion, FenceRun, VersionSpan
from configs.loader import load
from configs.settings import Settings

BEAT_EVERY_S = 2.0
BEATS = 5  # of an episode: it takes ten seconds
EPISODES = 4  # of an actor at a time
CHUNK_TOKENS = 32  # that an episode grows by between two beats
SEASONING = 600
"""Heartbeats after which an actor is as one that has been here for hours: ZeroMQ keeps two pieces
of 256 messages for each direction of a peer, 60 KiB in all, and comes to use them only slowly."""
DEADLINE_S = 30.0
IDLE_S = 0.2  # before asking again, when no work was admitted
MOST_BYTES = 2**20
JOINED = "joined"  # the first line of output; the figures are the last
PERCENTILES = (50, 99, 99.9)

Reply = TypeVar("Reply")


@dataclass(slots=True)
class Times:
    """Seconds from request to reply, by kind, since the last `clear`."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    unserved: int = 0
    """LEASE requests that got no work within the broker's long poll."""
    refused: int = 0
    """Episodes whose verdict was neither OK nor DUP."""

    def clear(self) -> None:
        """Forget the warm-up."""
        self.seconds.clear()
        self.unserved = self.refused = 0

    def shown(self) -> dict[str, Any]:
        """Return counts and percentiles in milliseconds."""
        figures: dict[str, Any] = {"unserved": self.unserved, "refused": self.refused}
        for kind, seconds in sorted(self.seconds.items()):
            values = np.percentile(seconds, PERCENTILES) * 1e3
            named = zip(PERCENTILES, values.tolist(), strict=True)
            figures[kind] = {"count": len(seconds)} | {
                f"p{percent:g}_ms": round(value, 3) for percent, value in named
            }
        return figures


class SimulatedActor:
    """One connection and its cycle; no retries, since a lost reply is a result here."""

    def __init__(self, socket: zmq.asyncio.Socket, settings: Settings, name: str) -> None:
        self._socket = socket
        self._settings = settings
        self._name = name
        self._seq = 0

    async def join(self, times: Times, *, heartbeats: int) -> None:
        """Say HELLO, and so many empty heartbeats."""
        hello = greeting(self._settings, self._name, capacity=EPISODES)
        await self._call(hello, Welcome, times, "hello")
        for _ in range(heartbeats):
            await self._call(BeatRequest((), NEWEST), Verdicts, times, "beat")

    async def live(self, records: Records, times: Times, *, delay_s: float) -> None:
        """Work until cancelled."""
        await asyncio.sleep(delay_s)
        while True:
            reply = await self._call(LeaseRequest(EPISODES, NEWEST), LeaseReply, times, "lease")
            if not reply.leases:
                times.seconds["lease"].pop()  # it waited for work, as it should
                times.unserved += 1
                await asyncio.sleep(IDLE_S)
                continue
            await self._generate(reply.leases, times)
            parcels = [Submission(x.task_id, x.fence, records.of(x.task_id)) for x in reply.leases]
            verdicts = await self._call(SubmitRequest(tuple(parcels)), Verdicts, times, "submit")
            _count_refused(verdicts, times)

    async def _generate(self, leases: Sequence[Lease], times: Times) -> None:
        for number in range(BEATS):
            await asyncio.sleep(BEAT_EVERY_S)
            beats = tuple(
                Beat(x.task_id, x.fence, number * CHUNK_TOKENS, CHUNK_TOKENS, CHUNK) for x in leases
            )
            verdicts = await self._call(BeatRequest(beats, NEWEST), Verdicts, times, "beat")
            _count_refused(verdicts, times)

    async def _call(self, message: object, kind: type[Reply], times: Times, name: str) -> Reply:
        began = time.perf_counter()
        self._seq += 1
        run = self._settings.run.name
        await self._socket.send(encode(message, run=run, incarnation=self._name, seq=self._seq))
        async with asyncio.timeout(DEADLINE_S):
            reply = decode(await self._socket.recv(), max_bytes=MOST_BYTES)
        if reply.seq != self._seq or not isinstance(reply.message, kind):
            raise RuntimeError(f"{self._name} must get a {kind.__name__}, got {reply.message}")
        times.seconds[name].append(time.perf_counter() - began)
        return reply.message


def _count_refused(reply: Verdicts, times: Times) -> None:
    times.refused += sum(v.verdict not in (Verdict.OK, Verdict.DUP) for v in reply.verdicts)


def _chunk() -> bytes:
    tokens = np.arange(CHUNK_TOKENS, dtype=np.int32)
    return encode_completion(
        Completion(
            token_ids=tokens,
            behaviour_logprobs=np.full(CHUNK_TOKENS, -1.0, np.float32),
            loss_mask=np.ones(CHUNK_TOKENS, np.uint8),
            versions=(VersionSpan(NEWEST, 0),),
            fences=(FenceRun(1, "actor", 0),),
        )
    )


CHUNK = _chunk()


async def measure(
    settings: Settings, *, actors: int, first: int, seconds: float, heartbeats: int
) -> dict[str, Any]:
    """Let the fleet work; what comes before its second cycle does not count."""
    times, records = Times(), Records()
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, actors + 16)
    cycle_s = BEATS * BEAT_EVERY_S
    numbers = range(first, first + actors)
    fleet = [
        SimulatedActor(socket, settings, f"actor-{number}")
        for number, socket in zip(numbers, _sockets(context, settings, numbers), strict=True)
    ]
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(actor.join(times, heartbeats=heartbeats) for actor in fleet))
        print(JOINED, flush=True)
        tasks = [
            asyncio.create_task(actor.live(records, times, delay_s=random.uniform(0, cycle_s)))
            for actor in fleet
        ]
        await _unless_one_ends(tasks, cycle_s + 2.0)
        times.clear()
        await _unless_one_ends(tasks, seconds)
        return {"actors": actors, "seconds": seconds} | times.shown()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


def _sockets(
    context: zmq.asyncio.Context, settings: Settings, numbers: Iterable[int]
) -> Iterable[zmq.asyncio.Socket]:
    """Yield a connection with a key of its own for each number: a key is one actor's."""
    folder = settings.run.folder / "keys"
    server_key = load_public(folder, "broker")
    for number in numbers:
        make_client(folder, f"fleet-{number}")
        yield connect_dealer(
            context,
            settings.broker.endpoint,
            keys=load_pair(folder, f"fleet-{number}"),
            server_key=server_key,
            max_message_bytes=MOST_BYTES,
        )


async def _unless_one_ends(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seasoned", action="store_true", help="send heartbeats before all else")
    parser.add_argument("--yields", action="store_true", help="to all other processes")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    if args.yields:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    settings = load(args.config)
    work = measure(
        settings,
        actors=args.actors,
        first=args.first,
        seconds=args.seconds,
        heartbeats=SEASONING if args.seasoned else 0,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(work)))


if __name__ == "__main__":
    main()
