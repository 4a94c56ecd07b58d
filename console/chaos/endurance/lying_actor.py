"""An actor with a key of the run that lies: `python -m console.chaos.endurance.lying_actor ...`.

It leases, and beats, submits, releases and fails under its own fences, under those next to them and
for tasks of others, with tokens that nobody sampled, impossible ones, and bytes that mean nothing.
Its key is suspended for that sooner or later, so it takes a new one every few minutes. What it was
granted is appended to a file: that is all that it may spoil.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from itertools import count
from pathlib import Path
from typing import TextIO

import numpy as np

from broker.client.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    FailRequest,
    Failure,
    Figures,
    Hello,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
)
from broker.transport.allow_list import Role, add, revoke
from broker.transport.keys import load_pair, load_public
from buffer.record.codec import decode_completion, encode_completion, encode_episode
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.errors import DeadlineError, RecordError, RefusedError
from configs.hashes import run_hashes
from configs.loader import load
from configs.settings import Settings

NAME = "liar"
"""Its keys and incarnations begin with it."""
KEY_LIFE_S = 120.0
KEY_SEEN_S = 3.0  # the broker follows the folder of keys
PATIENCE_S = 5.0
AT_MOST = 8  # tasks of one lease
REMEMBERED = 60  # leases
TOKENS = 12  # of which most models' vocabularies have more
IMPOSSIBLE = (10**6, -1)


class LyingActor:
    """One incarnation."""

    def __init__(self, name: str, settings: Settings, granted: TextIO, rng: random.Random) -> None:
        self._name, self._settings, self._granted, self._rng = name, settings, granted, rng
        keys = settings.broker.keys or settings.run.folder / "keys"
        self._incarnation = f"{name}-{rng.getrandbits(32):08x}"
        self._client = BrokerClient(
            settings.broker.endpoint,
            server_key=load_public(keys, "broker"),
            keys=load_pair(keys, name),
            run=settings.run.name,
            incarnation=self._incarnation,
        )
        self._leases: list[Lease] = []
        self._version = PolicyVersion(1, 0)

    async def live(self) -> None:
        """Lie until refused for good.

        Raises:
            NyalaError: The broker is away, or refuses the key.
        """
        hello = Hello(
            self._incarnation,
            host="localhost",
            pid=os.getpid(),
            hashes=run_hashes(self._settings.run),
            capacity=AT_MOST,
        )
        lies = [self._lease, self._beat, self._beat, self._submit, self._submit]
        lies += [self._release, self._fail]
        try:
            await self._client.hello(hello)
            while True:
                await asyncio.sleep(self._rng.uniform(0.05, 0.6))
                try:
                    await self._rng.choice(lies)()
                except (RefusedError, RecordError):
                    await self._client.hello(hello)  # raises where the key itself is refused
        finally:
            await self._client.close()

    async def _lease(self) -> None:
        # Of weights that nobody has: who has only those of a moment ago finds all work taken.
        ahead = self._version._replace(step=self._version.step + self._rng.randint(0, 5))
        request = LeaseRequest(self._rng.randint(1, AT_MOST), ahead)
        reply = await self._client.lease(request, deadline_s=PATIENCE_S)
        self._granted.writelines(f"{lease.task_id}\n" for lease in reply.leases)
        self._granted.flush()
        self._leases = [*self._leases, *reply.leases][-REMEMBERED:]
        if reply.publication is not None:
            self._version = reply.publication.version

    async def _beat(self) -> None:
        beats = []
        for task, fence in self._targets():
            tokens = self._rng.randint(0, 6)
            chunk = self._chunk(fence, tokens) if tokens else b""
            beats.append(Beat(task, fence, self._rng.choice([0, 0, 3, 40]), tokens, chunk))
        stats = Figures(tokens_per_s=self._rng.choice([0.0, -1.0, 1e300]))
        request = BeatRequest(tuple(beats), self._version, stats)
        await self._client.beat(request, deadline_s=PATIENCE_S)

    async def _submit(self) -> None:
        rows = [Submission(t, f, self._record(t, f)) for t, f in self._targets()]
        await self._client.submit(SubmitRequest(tuple(rows)), deadline_s=PATIENCE_S)

    async def _release(self) -> None:
        targets = tuple(self._targets())
        if targets:  # to release nothing is to leave
            await self._client.release(ReleaseRequest(targets), deadline_s=PATIENCE_S)

    async def _fail(self) -> None:
        rows = [Failure(t, f, "data", "\x1b[2Jnothing") for t, f in self._targets()]
        await self._client.fail(FailRequest(tuple(rows)), deadline_s=PATIENCE_S)

    def _targets(self) -> list[tuple[int, int]]:
        """Its own leases, one in three of them under another fence or for another task."""
        rng, found = self._rng, []
        for lease in rng.sample(self._leases, min(len(self._leases), rng.randint(1, 4))):
            task, fence = lease.task_id, lease.fence
            if rng.random() < 1 / 3:
                task = max(0, task + rng.randint(-8, 8))
                fence += rng.choice([0, 0, 1, -1, rng.randint(-(10**6), 10**6)])
            found.append((task, fence))
            held = [run.fence for run in _seen(lease)]
            if held and rng.random() < 1 / 3:  # of the actor that had it before
                found.append((task, rng.choice(held)))
        return found

    def _chunk(self, fence: int, tokens: int) -> bytes:
        if self._rng.random() < 0.1:
            return self._rng.randbytes(20)
        return encode_completion(self._completion(fence, tokens))

    def _completion(self, fence: int, tokens: int) -> Completion:
        ids = [self._rng.randrange(TOKENS) for _ in range(tokens)]
        if self._rng.random() < 0.1:
            ids[0] = self._rng.choice(IMPOSSIBLE)
        return Completion(
            token_ids=np.array(ids, np.int32),
            behaviour_logprobs=np.full(tokens, -self._rng.random(), np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(VersionSpan(self._version, 0),),
            fences=(FenceRun(fence, self._rng.choice([self._name, "somebody"]), 0),),
        )

    def _record(self, task: int, fence: int) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.randbytes(50)
        return encode_episode(
            Episode(
                task_id=task,
                group_id=task // self._settings.run.group_size,
                purpose="train",
                prompt_ids=np.array([3, 4], np.int32),
                completion=self._completion(fence, rng.choice([1, 5, 60, 8000])),
                reward=rng.choice([0.0, 1.0, 1e9, float("nan")]),
                reward_parts={},
                finish_reason="stop",
                environment_metrics={},
                incarnation=self._incarnation,
                started_at=0.0,
                finished_at=1.0,
                metadata={},
            )
        )


def _seen(lease: Lease) -> list[FenceRun]:
    """Return the fences in the chunks that came with a lease."""
    return [run for chunk in lease.chunks for run in decode_completion(chunk).fences]


async def lie_on(config: Path, granted: TextIO, seed: int) -> None:
    """Lie under one key after the other."""
    rng = random.Random(seed)
    for number in count(1):
        settings = load(config)
        keys = settings.broker.keys or settings.run.folder / "keys"
        name = f"{NAME}-{number}"
        add(keys, name, Role.ACTOR)
        await asyncio.sleep(KEY_SEEN_S)
        try:
            async with asyncio.timeout(KEY_LIFE_S):
                while True:
                    try:
                        await LyingActor(name, settings, granted, rng).live()
                    except (DeadlineError, RefusedError, RecordError) as error:
                        print(name, error, file=sys.stderr, flush=True)
                        await asyncio.sleep(1.0)
        except TimeoutError:
            revoke(keys, name)


def main() -> None:
    """Lie until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--granted", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with chosen.granted.open("a", encoding="utf-8") as granted:
        asyncio.run(lie_on(chosen.config, granted, chosen.seed))


if __name__ == "__main__":
    main()
