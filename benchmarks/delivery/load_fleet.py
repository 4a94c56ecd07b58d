"""Actors without engines that ask as much of one or two brokers as they are told to.

    python -m benchmarks.delivery.load_fleet run/config.yaml beats --rate 2000 --seconds 3 tcp://...
    python -m benchmarks.delivery.load_fleet run/config.yaml episodes --actors 400 tcp://... tcp://...

`beats` offers heartbeats at a fixed rate and counts from the moment at which each was due, so its
times hold whatever queue there is, this process's own included. `episodes` lets each actor lease
eight episodes, submit records of 16 KiB at once and lease again, beside a heartbeat every 2 s: the
more actors, the more is asked. What is refused as `busy` is sent again after the time that the
broker names, with jitter, as the real client does; times are until the last answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from benchmarks.delivery.records import NEWEST, Records
from benchmarks.delivery.sources import greeting
from benchmarks.delivery.tally import Tally
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    Lease,
    LeaseRequest,
    Refusal,
    Submission,
    SubmitRequest,
    Verdict,
)
from broker.transport.keys import load_pair, load_public, make_client
from broker.transport.sockets import connect_dealer
from configs.errors import DeadlineError
from configs.loader import load
from configs.settings import Settings

BEAT_EVERY_S = 2.0
BEATING = 64  # actors that share the rate of `beats`
EPISODES = 8  # of an actor at a time
TRY_S = 5.0  # then the same is sent again, as the real client does
MOST_BYTES = 2**20
JOINING = 64  # at once: each is a handshake
QUICK_S = 0.2  # an answer that is not waited for
RECOVER_S = 60.0
ANSWERED_S = 120.0  # whatever was resent and refused until then; longer is no overload but a fault


class LoadActor:
    """One connection, over which several requests may be under way."""

    def __init__(self, socket: zmq.asyncio.Socket, settings: Settings, name: str) -> None:
        self._socket = socket
        self._settings = settings
        self.name = name
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._reader = asyncio.create_task(self._read())
        self._held: tuple[Lease, ...] = ()
        self._beating: asyncio.Task[None] | None = None
        self.tally = Tally()
        """Of its heartbeats."""
        self._sent_at = time.perf_counter()
        self.quiet_s = 0.0
        """Longest time in which it sent nothing, whatever the reason."""

    async def _read(self) -> None:
        while True:
            reply = decode(await self._socket.recv(), max_bytes=MOST_BYTES)
            answer = self._answers.get(reply.seq)
            if answer is not None and not answer.done():
                answer.set_result(reply.message)

    async def call(
        self, message: object, tally: Tally, kind: str, *, due: float | None = None
    ) -> Any:
        """Send until answered; returns the answer.

        Raises:
            DeadlineError: No broker answers.
        """
        began = time.perf_counter() if due is None else due
        try:
            async with asyncio.timeout(ANSWERED_S):
                reply = await self._ask(message, tally, kind)
        except TimeoutError as error:
            raise DeadlineError(
                f"no broker answered a {kind} of {self.name} within {ANSWERED_S:g} s"
            ) from error
        tally.seconds[kind].append(time.perf_counter() - began)
        return reply

    async def _ask(self, message: object, tally: Tally, kind: str) -> Any:
        seq = next(self._numbers)
        run = self._settings.run.name
        frame = encode(message, run=run, incarnation=self.name, seq=seq)
        try:
            while True:
                answer = self._answers[seq] = asyncio.get_running_loop().create_future()
                now = time.perf_counter()
                self.quiet_s, self._sent_at = max(self.quiet_s, now - self._sent_at), now
                await self._socket.send(frame)
                try:
                    # Not wait_for: on Python 3.11 it may swallow a cancellation.
                    async with asyncio.timeout(TRY_S):
                        reply = await answer
                except TimeoutError:
                    tally.resent += 1
                    continue
                if not isinstance(reply, Refusal):
                    return reply
                if reply.code == "hello":  # its connection was lost under the load
                    tally.rejoined += 1
                    await self.join(tally)
                    continue
                assert reply.code == "busy", reply
                tally.busy[kind] += 1
                await asyncio.sleep(reply.retry_after_s * random.uniform(0.5, 1.5))
        finally:
            self._answers.pop(seq, None)

    async def join(self, tally: Tally) -> None:
        """Say HELLO."""
        hello = greeting(self._settings, self.name, capacity=EPISODES)
        await self.call(hello, tally, "hello")

    async def leave(self, tally: Tally) -> None:
        """Say BYE."""
        if self._beating is not None:
            self._beating.cancel()
            with suppress(asyncio.CancelledError):
                await self._beating
        await self.call(Bye(), tally, "hello")

    async def beat(self, tally: Tally, *, due: float | None = None) -> None:
        """Send one heartbeat, for the leases that it has."""
        beats = tuple(Beat(lease.task_id, lease.fence) for lease in self._held)
        await self.call(BeatRequest(beats, NEWEST), tally, "beat", due=due)

    async def join_and_beat(self, tally: Tally) -> None:
        """Say HELLO, and from then on beat as an actor does, until it leaves."""
        await self.join(tally)
        self._sent_at = time.perf_counter()
        self._beating = asyncio.create_task(self._keep_beating())

    async def _keep_beating(self) -> None:
        await asyncio.sleep(random.uniform(0, BEAT_EVERY_S))
        while True:
            await self.beat(self.tally)
            await asyncio.sleep(BEAT_EVERY_S)

    async def work(self, records: Records, tally: Tally) -> None:
        """Lease and submit, over and over."""
        while True:
            reply = await self.call(LeaseRequest(EPISODES, NEWEST), tally, "lease")
            if not reply.leases:
                tally.seconds["lease"].pop()  # it waited for work, as it should
                continue
            self._held = reply.leases
            parcels = [Submission(x.task_id, x.fence, records.of(x.task_id)) for x in reply.leases]
            answer = await self.call(SubmitRequest(tuple(parcels)), tally, "submit")
            self._held = ()
            taken = sum(v.verdict in (Verdict.OK, Verdict.DUP) for v in answer.verdicts)
            tally.episodes += taken
            tally.lost += len(parcels) - taken

    def close(self) -> None:
        """Stop reading."""
        self._reader.cancel()


class Fleet:
    """Actors spread over the brokers."""

    def __init__(self, settings: Settings, endpoints: Sequence[str], actors: int) -> None:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, actors + 64)
        self._settings = settings
        self.silent_s = settings.broker.heartbeat_timeout_s
        """Whoever sends nothing for so long is late, whatever the brokers do."""
        self._endpoints = cycle(endpoints)
        self.actors = [self._actor(number) for number in range(actors)]

    def _actor(self, number: int) -> LoadActor:
        folder = self._settings.run.folder / "keys"
        make_client(folder, "actor")  # which all of them share
        socket = connect_dealer(
            self._context,
            next(self._endpoints),
            keys=load_pair(folder, "actor"),
            server_key=load_public(folder, "broker"),
            max_message_bytes=MOST_BYTES,
            may_queue=True,
        )
        return LoadActor(socket, self._settings, f"load-{random.getrandbits(40):x}-{number}")

    async def join(self, *, and_beat: bool) -> Tally:
        """Let all say HELLO."""
        return await self._ask_all(LoadActor.join_and_beat if and_beat else LoadActor.join)

    async def leave(self) -> None:
        """Let all say BYE: who only vanished would be silent for the brokers, and so suspect."""
        await self._ask_all(LoadActor.leave)

    async def _ask_all(self, what: Callable[[LoadActor, Tally], Awaitable[None]]) -> Tally:
        tally, door = Tally(), asyncio.Semaphore(JOINING)

        async def ask(actor: LoadActor) -> None:
            async with door:
                await what(actor, tally)

        await asyncio.gather(*(ask(actor) for actor in self.actors))
        return tally

    async def until_quick(self) -> float:
        """Return the seconds until a heartbeat is answered at once, three times in a row."""
        began, quick = time.perf_counter(), 0
        while quick < 3 and time.perf_counter() - began < RECOVER_S:
            tally = Tally()
            await self.actors[0].beat(tally)
            quick = quick + 1 if tally.seconds["beat"][0] < QUICK_S else 0
        return time.perf_counter() - began

    def close(self) -> None:
        """Drop all connections."""
        for actor in self.actors:
            actor.close()
        self._context.destroy(linger=0)


async def offer_beats(fleet: Fleet, rate: float, seconds: float) -> dict[str, Any]:
    """Send heartbeats at a fixed rate, whether the earlier ones are answered or not."""
    tally = Tally()
    began = time.perf_counter()
    async with asyncio.TaskGroup() as calls:
        for number, actor in zip(range(int(rate * seconds)), cycle(fleet.actors), strict=False):
            due = began + number / rate
            early_s = due - time.perf_counter()
            if early_s > 0 or number % 16 == 0:  # late: the answers have their turn now and then
                await asyncio.sleep(max(0.0, early_s))
            calls.create_task(actor.beat(tally, due=due))
    took_s = time.perf_counter() - began
    return {"offered_per_s": rate, **tally.shown(took_s)["beat"]}


async def make_episodes(fleet: Fleet, seconds: float) -> dict[str, Any]:
    """Let all actors work as fast as they are let."""
    tally, records = Tally(), Records()
    for actor in fleet.actors:
        actor.quiet_s, actor.tally = 0.0, tally
    tasks = [asyncio.create_task(actor.work(records, tally)) for actor in fleet.actors]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    figures = tally.shown(seconds)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


async def play(chosen: argparse.Namespace) -> dict[str, Any]:
    """Join, ask, and see how soon the brokers are quick again."""
    settings = load(chosen.config)
    is_beats = chosen.what == "beats"
    fleet = Fleet(settings, chosen.endpoints, BEATING if is_beats else chosen.actors)
    try:
        joined = (await fleet.join(and_beat=not is_beats)).shown(1.0)["hello"]
        cpu = time.process_time()
        if is_beats:
            figures = await offer_beats(fleet, chosen.rate, chosen.seconds)
        else:
            figures = {"actors": chosen.actors, **await make_episodes(fleet, chosen.seconds)}
        figures["client_cpu_s"] = round(time.process_time() - cpu, 2)
        figures["joining_busy"] = joined["busy"]
        figures["recovered_s"] = round(await fleet.until_quick(), 2)
        await fleet.leave()
        quiet = [actor.quiet_s for actor in fleet.actors]
        figures["late"] = sum(seconds > fleet.silent_s for seconds in quiet)
        figures["quiet_s"] = round(max(quiet), 2)
        return figures
    finally:
        fleet.close()


def main() -> None:
    """Play and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("what", choices=("beats", "episodes"))
    parser.add_argument("endpoints", nargs="+")
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--actors", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0)
    chosen = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two descriptors for each actor
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(play(chosen))))


if __name__ == "__main__":
    main()
