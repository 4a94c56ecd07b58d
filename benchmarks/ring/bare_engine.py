"""vLLM alone, fed with an actor's requests: through `LLMEngine`, and as an actor steps it.

A process of its own. Reads lines `ARM WARM_UP_S WINDOW_S` on stdin, steps for that long, answers
each with a JSON line, and stands still in between. `ready` comes first. Both arms keep a constant
number of requests running, in one and the same core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, cast

from actors.assembly import prepare
from actors.engine.choice import engine_device, episodes_at_a_time
from actors.engine.engine import GenerationRequest
from actors.engine.threaded import ThreadedEngine
from actors.engine.vllm_engine import VllmStepper
from actors.engine_of_settings import make_engine
from actors.environments.calls import drive
from broker.protocol.messages import Lease
from configs.loader import load
from configs.settings import Settings
from learner.data.curriculum import training_task

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

NUM_REQUESTS = 2048  # then again from the first: making them is not a part of the engine
FIRST_S = 0.1
STREAM_INTERVAL = 8
"""Tokens of a request that `LLMEngine` returns together: at 1 it would make more objects."""


class BareEngine:
    """`LLMEngine.step()` in a loop."""

    def __init__(
        self, engine: LLMEngine, requests: Iterator[GenerationRequest], concurrency: int
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._concurrency = concurrency
        self._names = map("bare-{}".format, count())
        self._running: set[str] = set()

    def run(self, seconds: float) -> tuple[int, float]:
        """Generate for so long; returns tokens and CPU seconds."""
        tokens, began, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            while len(self._running) < self._concurrency:
                self._begin(next(self._requests))
            for output in self._engine.step():
                tokens += len(output.outputs[0].token_ids)
                if output.finished:
                    self._running.discard(output.request_id)
        return tokens, time.process_time() - cpu

    def stop(self) -> None:
        """Drop what runs."""
        self._engine.abort_request(list(self._running))
        self._running.clear()

    def _begin(self, request: GenerationRequest) -> None:
        from vllm.inputs import tokens_input

        name = next(self._names)
        self._running.add(name)
        prompt = tokens_input(list(request.token_ids), cache_salt="0")
        self._engine.add_request(name, prompt, sampling_of(request))


class BareCore:
    """The stepper of an actor in a loop, which takes tokens where vLLM's core hands them over."""

    def __init__(
        self, stepper: VllmStepper, requests: Iterator[GenerationRequest], concurrency: int
    ) -> None:
        self._stepper = stepper
        self._requests = requests
        self._concurrency = concurrency
        self._keys = count(1)
        self._running: set[int] = set()

    def run(self, seconds: float) -> tuple[int, float]:
        """Generate for so long; returns tokens and CPU seconds."""
        tokens, began, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            while len(self._running) < self._concurrency:
                self._begin(next(self._requests))
            for sampled in self._stepper.step():
                tokens += len(sampled.token_ids)
                if sampled.finish_reason is not None:
                    self._running.discard(sampled.key)
        return tokens, time.process_time() - cpu

    def stop(self) -> None:
        """Drop what runs."""
        self._stepper.cancel(list(self._running))
        self._running.clear()

    def _begin(self, request: GenerationRequest) -> None:
        key = next(self._keys)
        self._running.add(key)
        self._stepper.admit(key, request, request.max_tokens)


def sampling_of(request: GenerationRequest) -> SamplingParams:
    """Ask for the actor's tokens with the least that `LLMEngine` can make of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def requests_of(settings: Settings) -> Iterator[GenerationRequest]:
    """Yield what an actor asks its engine for, in the order of the curriculum."""
    tools = asyncio.run(prepare(settings, "bare-engine"))
    maker, environment = tools.maker, tools.environments[0].make()
    for task_id in range(NUM_REQUESTS):
        lease = Lease(task_id, 1, training_task(settings.run, task_id), 0, ())
        yield drive(maker.begin_episode(lease, environment)).request()


def started_stepper(settings: Settings) -> VllmStepper:
    """Start the engine of an actor, which also streams as `LLMEngine` does at its quickest."""
    threaded, _ = make_engine(settings)
    options = cast(VllmStepper, cast(ThreadedEngine, threaded)._stepper)._options
    stepper = VllmStepper(replace(options, engine_args={"stream_interval": STREAM_INTERVAL}))
    stepper.start()
    return stepper


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    settings = load(parser.parse_args().config)
    requests = cycle(list(requests_of(settings)))
    stepper = started_stepper(settings)
    concurrency = episodes_at_a_time(settings, on_gpu=engine_device() == "cuda")
    arms: dict[str, BareEngine | BareCore] = {
        "engine": BareEngine(stepper._engine, requests, concurrency),
        "core": BareCore(stepper, requests, concurrency),
    }
    for arm in arms.values():  # vLLM writes what it has to say of a first request to stdout
        arm.run(FIRST_S)
        arm.stop()
    print("ready", flush=True)
    for line in sys.stdin:
        name, warm_up_s, window_s = line.split()
        figures = measured(arms[name].run, float(warm_up_s), float(window_s))
        arms[name].stop()
        print(json.dumps(figures), flush=True)


def measured(
    run: Callable[[float], tuple[int, float]], warm_up_s: float, window_s: float
) -> dict[str, float]:
    """Run for a while, and then for the window."""
    run(warm_up_s)
    began = time.monotonic()
    tokens, cpu_s = run(window_s)
    return {"tokens": tokens, "wall_s": time.monotonic() - began, "cpu_s": cpu_s}


if __name__ == "__main__":
    main()
