"""vLLM alone: the actor's engine, fed with an actor's requests.

A process of its own. Reads lines `WARM_UP_S WINDOW_S` on stdin, steps the engine for that long,
answers each with a JSON line, and stands still in between. `ready` comes first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, cast

from actors.assembly import make_engine, prepare
from actors.engine.engine import Request
from actors.engine.threaded import ThreadedEngine
from actors.engine.vllm_engine import VllmStepper, _sampling
from actors.environments.calls import drive
from broker.protocol.messages import Lease
from configs.loader import load
from configs.settings import Settings
from learner.data.curriculum import training_task

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

NUM_REQUESTS = 2048  # then again from the first: making them is not a part of the engine


class BareEngine:
    """`LLMEngine.step()` in a loop with a constant number of running requests."""

    def __init__(self, engine: LLMEngine, requests: list[Request], concurrency: int) -> None:
        self._engine = engine
        self._requests = cycle(requests)
        self._concurrency = concurrency
        self._num_begun = 0
        self._num_running = 0

    def run(self, seconds: float) -> tuple[int, float]:
        """Generate for so long; returns tokens and CPU seconds."""
        tokens, began, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            while self._num_running < self._concurrency:
                self._begin(next(self._requests))
            for output in self._engine.step():
                tokens += len(output.outputs[0].token_ids)
                self._num_running -= output.finished
        return tokens, time.process_time() - cpu

    def _begin(self, request: Request) -> None:
        from vllm.inputs import tokens_input

        self._num_begun += 1
        self._num_running += 1
        self._engine.add_request(
            f"bare-{self._num_begun}",
            tokens_input(list(request.token_ids), cache_salt="0"),
            _sampling(request, request.max_tokens),
        )


def requests_of(settings: Settings) -> Iterator[Request]:
    """Yield what an actor asks its engine for, in the order of the curriculum."""
    tools = asyncio.run(prepare(settings, "bare-engine"))
    maker, environment = tools.maker, tools.environments[0].make()
    for task_id in range(NUM_REQUESTS):
        lease = Lease(task_id, 1, training_task(settings.run, task_id), 0, ())
        yield drive(maker.begin(lease, environment)).request()


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    settings = load(parser.parse_args().config)
    requests = list(requests_of(settings))
    threaded, _ = make_engine(settings)
    stepper = cast(VllmStepper, cast(ThreadedEngine, threaded)._stepper)
    stepper.start()
    bare = BareEngine(stepper._engine, requests, settings.actors.max_concurrent_episodes)
    print("ready", flush=True)
    for line in sys.stdin:
        warm_up_s, window_s = map(float, line.split())
        bare.run(warm_up_s)
        began = time.monotonic()
        tokens, cpu_s = bare.run(window_s)
        wall_s = time.monotonic() - began
        print(json.dumps({"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
