"""An actor with a key of the run that lies: `python -m lab.endurance.lying_actor ...`.

`endurance.py` starts it; its messages come from `lies.py`. Its key is suspended sooner or later, so
it takes a new one every few minutes. The tasks that it is granted are appended to a file: only
these may be spoilt.
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

from broker.client import BrokerClient
from broker.protocol.messages import Hello, LeaseReply
from broker.transport.allow_list import Role, add, revoke
from broker.transport.keys import load_pair, load_public
from configs.errors import DeadlineError, RecordError, RefusedError
from configs.hashes import run_hashes
from configs.loader import load
from configs.settings import Settings

from .lies import ForgedRequests, ask

NAME = "liar"
"""Prefix of its keys and incarnations."""
KEY_LIFE_S = 120.0
KEY_SEEN_S = 3.0  # the broker follows the folder of keys
AT_MOST = 8  # tasks of one lease
PROMPT = (3, 4)


class LyingActor:
    """One incarnation of the lying actor."""

    def __init__(self, name: str, settings: Settings, granted: TextIO, rng: random.Random) -> None:
        self._settings, self._granted, self._rng = settings, granted, rng
        keys = settings.keys_folder
        self._incarnation = f"{name}-{rng.getrandbits(32):08x}"
        self._lies = ForgedRequests(
            rng,
            self._incarnation,
            group_size=settings.run.group_size,
            at_most=AT_MOST,
            prompt_of=lambda _group: PROMPT,
        )
        self._client = BrokerClient(
            settings.broker.endpoint,
            server_key=load_public(keys, "broker"),
            keys=load_pair(keys, name),
            run=settings.run.name,
            incarnation=self._incarnation,
        )

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
        try:
            await self._client.hello(hello)
            while True:
                await asyncio.sleep(self._rng.uniform(0.05, 0.6))
                try:
                    await self._lie()
                except (RefusedError, RecordError):
                    await self._client.hello(hello)  # raises where the key itself is refused
        finally:
            await self._client.close()

    async def _lie(self) -> None:
        for request in self._lies.next():
            reply = await ask(self._client, request)
            if isinstance(reply, LeaseReply):
                self._granted.writelines(f"{lease.task_id}\n" for lease in reply.leases)
                self._granted.flush()
                self._lies.hear(reply)


async def lie_on(config: Path, granted: TextIO, seed: int) -> None:
    """Lie under one key after another, for ever.

    Each key is added to the run's keys, and revoked after two minutes.
    """
    rng = random.Random(seed)
    for number in count(1):
        settings = load(config)
        keys = settings.keys_folder
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
    """Lie until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--granted", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with chosen.granted.open("a", encoding="utf-8") as granted:
        asyncio.run(lie_on(chosen.config, granted, chosen.seed))


if __name__ == "__main__":
    main()
