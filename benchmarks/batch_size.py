"""The number of episodes that an actor finds, beside a sweep; prints JSON.

    python -m benchmarks.batch_size [--blocks 384] [--full]

A real vLLM whose KV cache holds `--blocks` blocks. Requests of uneven length keep as many of its
places busy as there is room for: fixed numbers in turns, twice, then what `Tuner` finds. Then this
and the sweep's best take turns; the ratio is the median of the pairs' tokens per second, found over
best, between the second least and the second most of them (of nine, 96 % of the time).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from actors.capacity import LOOK_S, ActorCounts, CacheMeter, ConcurrencyLimit, Tuner, leases_for
from actors.engine.engine import GenerationRequest
from actors.engine.threaded import ThreadedEngine
from actors.engine.vllm_engine import vllm_engine
from actors.engine.vllm_options import VllmOptions
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since
from benchmarks.support.workload import THROUGHPUT, Workload, make_model
from configs.settings import ActorSettings

PROMPT_TOKENS = 16
LENGTHS = (32, 320)
"""Least and most tokens of a completion; as many of each."""
SETTLE_S = 3.0


class Extent(NamedTuple):
    """How much is measured."""

    numbers: tuple[int, ...]
    """Of the sweep."""
    window_s: float
    tune_s: float
    pairs: int


BRIEF = Extent((8, 32, 128), 2.0, 20.0, 2)
FULL = Extent((8, 16, 32, 48, 64, 96, 128), 8.0, 150.0, 9)


class Generator:
    """Keeps an engine's places busy, as an actor does."""

    def __init__(self, engine: ThreadedEngine, room: ConcurrencyLimit) -> None:
        self._engine, self.room = engine, room
        self._chance = random.Random(0)
        self._running: set[str] = set()
        self._begun = 0
        self.tokens = 0

    def seen(self) -> ActorCounts:
        return ActorCounts(self.tokens, len(self._running), self._begun - len(self._running))

    async def run(self) -> None:
        """Generate until cancelled."""
        while True:
            self._fill()
            for delta in await self._engine.deltas():
                self.tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._running.discard(delta.request_id)

    def _fill(self) -> None:
        missing = self.room.most - len(self._running)
        self._engine.submit([self._request() for _ in range(missing)])

    def _request(self) -> GenerationRequest:
        self._begun += 1
        self._running.add(str(self._begun))
        prompt = tuple(self._chance.randrange(3, 20) for _ in range(PROMPT_TOKENS))
        return GenerationRequest(str(self._begun), prompt, self._chance.randint(*LENGTHS), 1.0, ())


async def measure(
    model: Path, blocks: int, extent: Extent, say: Callable[[str], None]
) -> dict[str, Any]:
    """Sweep, then let the number be found."""
    meter, numbers = CacheMeter(), extent.numbers
    options = VllmOptions(
        str(model),
        max_model_len=PROMPT_TOKENS + LENGTHS[1] + 1,
        max_concurrent=max(numbers),
        engine_args={"num_gpu_blocks_override": blocks},
    )
    engine = vllm_engine(options, meter=meter)
    await engine.start()
    generator = Generator(engine, ConcurrencyLimit(numbers[0], group_size=1))
    work = asyncio.create_task(generator.run())
    sweep: dict[int, list[float]] = {number: [] for number in numbers}
    evicted = dict.fromkeys(numbers, 0)
    for number in numbers + numbers[::-1]:
        generator.room.resize(leases_for(number))
        await asyncio.sleep(SETTLE_S)
        before = meter.memory.evicted if meter.memory else 0
        sweep[number].append(await _speed(generator, extent.window_s))
        evicted[number] += (meter.memory.evicted if meter.memory else 0) - before
        say(f"{number}: {sweep[number][-1]:.0f} tokens/s, {evicted[number]} evicted")
    bounds = ActorSettings(
        max_concurrent_episodes="auto",
        least_concurrent_episodes=numbers[0],
        most_concurrent_episodes=numbers[-1],
    )
    tuner = Tuner(generator.room, bounds, meter)
    path = [generator.room.most]
    began = time.monotonic()
    while time.monotonic() < began + extent.tune_s:
        await asyncio.sleep(LOOK_S)
        tuner.tune_room(time.monotonic(), generator.seen())
        if generator.room.most != path[-1]:
            path.append(generator.room.most)
            say(f"{path[-1]}: {tuner.reason}")
    best = max(sweep, key=lambda number: statistics.mean(sweep[number]))
    found, most = path[-1], leases_for(best)
    pairs = [
        await _in_turns(generator, (found, most) if turn % 2 else (most, found), extent.window_s)
        for turn in range(extent.pairs)
    ]
    work.cancel()
    await engine.close()
    return {
        "sweep": {number: statistics.mean(speeds) for number, speeds in sweep.items()},
        "evicted": evicted,
        "best": best,
        "found": path,
        "speeds": [{"found": pair[found], "best": pair[most]} for pair in pairs],
    }


async def _in_turns(
    generator: Generator, rooms: tuple[int, int], window_s: float
) -> dict[int, float]:
    """Return tokens per second with each of two rooms, one after the other."""
    speeds = {}
    for number in rooms:
        generator.room.resize(number)
        await asyncio.sleep(SETTLE_S)
        speeds[number] = await _speed(generator, window_s)
    return speeds


async def _speed(generator: Generator, window_s: float) -> float:
    began, tokens = time.monotonic(), generator.tokens
    await asyncio.sleep(window_s)
    return (generator.tokens - tokens) / (time.monotonic() - began)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=384, help="of the KV cache, of 32 tokens")
    parser.add_argument("--full", action="store_true", help="numbers to quote; ten minutes")
    chosen = parser.parse_args()
    machine = describe_machine()
    say = say_since(time.monotonic())
    with TemporaryDirectory(prefix="nyala-batch-size-") as scratch:
        model = make_model(Workload("batch-size", "demo.yaml", Path(scratch), THROUGHPUT))
        extent = FULL if chosen.full else BRIEF
        arms = asyncio.run(measure(model, chosen.blocks, extent, say))
    pairs = sorted(pair["found"] / pair["best"] for pair in arms["speeds"])
    arms["between"] = pairs[1], pairs[-2]
    ratios = {"found / best": statistics.median(pairs)}
    print(json.dumps({"arms": arms, "ratios": ratios, "machine": machine}))


if __name__ == "__main__":
    main()
