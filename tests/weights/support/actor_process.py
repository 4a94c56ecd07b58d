"""An actor that only receives weights: its own process, so that it can be killed and stopped.

Forked from a server that has torch imported, because that import takes seconds. Gets publications
and writes lines (dicts) through a pipe: `synced` once, `applied` for each version, `counters` after
it, `failed` with the error that ended it.
"""

import asyncio
import os
import signal
from dataclasses import asdict
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from msgspec import structs

from actors.engine.weights import group as weight_group
from actors.weights.held import HeldWeights
from actors.weights.links import ActorIdentity
from actors.weights.receiver import WeightReceiver
from broker.protocol.weight_messages import WeightChunk
from broker.transport.keys import load_pair
from configs.errors import MixedWeights, NyalaError
from configs.logging import configure_logging
from configs.settings import ActorSettings
from lab.faults.network import enter
from tests.weights.support.toy_model import ToyEngine


class TellingEngine(ToyEngine):
    def __init__(self, say, stops_at=None, overwritten=0):
        super().__init__()
        self.say = say
        self.stops_at = stops_at
        self.overwritten = overwritten

    def read(self, staged):
        """Stop in the middle of one version, as a process that is swapped out.

        Of so many first ones, be left with a mixture, as an engine that loads in place.
        """
        if self.overwritten:
            self.overwritten -= 1
            raise MixedWeights("overwritten, says the test")
        if staged.manifest.version.step != self.stops_at:
            return super().read(staged)
        weights = {}
        for name, tensor in self.tensors(staged):
            weights[name] = tensor.clone()
            if len(weights) == 1:
                self.say(event="halfway")
                os.kill(os.getpid(), signal.SIGSTOP)
        return weights

    async def apply(self, staged):
        pause_s = await super().apply(staged)
        self.say(event="applied", version=staged.manifest.version, digest=staged.manifest.digest)
        return pause_s


class BlindEngine(TellingEngine):
    """Says what the learner says: of a model that it cannot compute, only bytes matter here."""

    async def apply(self, staged):
        self.logprobs = staged.manifest.probe.logprobs
        return await super().apply(staged)

    async def probe(self, token_ids):
        return self.logprobs


def lie_to_others() -> None:
    """Make this process send other actors slices that are not what they should be."""

    def lying(held, pull):
        told = answer(held, pull)
        if isinstance(told, WeightChunk):
            told = structs.replace(told, payload=bytes([told.payload[0] ^ 1]) + told.payload[1:])
        return told

    answer, HeldWeights.answer = HeldWeights.answer, lying  # type: ignore[method-assign]


def strike_in_collective(strike: int | str, nth: int) -> None:
    """Make the nth receive of this process end in a signal to itself, or in `corrupt` memory."""
    receive = weight_group.ReceivingGroup.receive
    calls = count(1)

    def struck(group, memory, **deadlines):
        is_nth = next(calls) == nth
        if is_nth and isinstance(strike, int):
            os.kill(os.getpid(), strike)
        for bucket in receive(group, memory, **deadlines):
            if is_nth and strike == "corrupt":
                memory[0] ^= 1
            yield bucket

    weight_group.ReceivingGroup.receive = struck  # type: ignore[method-assign, assignment]


async def live(options: dict, pipe: Connection, say) -> None:
    made = BlindEngine if options.get("is_blind") else TellingEngine
    engine = made(say, options.get("stops_at"), options.get("overwritten", 0))
    engine.spoil, engine.lag = options.get("spoil", 0), options.get("lag", 0)
    receiver = WeightReceiver(
        engine,
        ActorSettings(
            weight_timeout_s=options.get("timeout_s", 8.0),
            pull_from=options.get("pull_from", ("peers", "publisher")),
            share_endpoint="tcp://127.0.0.1:0" if options.get("shares") else None,
            site=options.get("site"),
        ),
        caller=ActorIdentity(
            load_pair(Path(options["keys"]), options.get("key", "actor")),
            options.get("run", "toy"),
            options["name"],
        ),
        staging=Path(options["staging"]),
        keys_folder=Path(options["keys"]),
    )
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), lambda: receiver.offer(pipe.recv()))

    async def tell():
        version = await receiver.first_sync(options["publication"])
        say(event="synced", version=version)
        updates = -1
        while True:
            if receiver.counters.updates != updates:
                updates = receiver.counters.updates
                say(event="counters", **asdict(receiver.counters))
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receiver.run())
        tasks.create_task(tell())


def run(options: dict, pipe: Connection) -> None:
    configure_logging("actor", run="toy", incarnation=options["name"])
    if "network" in options:
        enter(options["network"])
    if "strike" in options:
        strike_in_collective(options["strike"], options["nth"])

    if options.get("lies"):
        lie_to_others()

    def say(**line):
        pipe.send(line)

    try:
        asyncio.run(live(options, pipe, say))
    except* NyalaError as group:
        error = group.exceptions[0]
        say(event="failed", kind=type(error).__name__, text=str(error))
