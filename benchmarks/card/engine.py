"""Decoding by Nyala's engine beside vLLM's own `LLMEngine` over the same core, and its swaps.

Both keep the same number of requests running, in turns; under CUDA graphs, as an actor does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.engine.engine import GenerationRequest, StagedWeights
from actors.engine.threaded import ThreadedEngine
from actors.engine.vllm_engine import VllmStepper
from actors.engine.vllm_options import VllmOptions
from benchmarks.card.machine import now
from benchmarks.card.rows import TINY
from benchmarks.card.stage import Asked, Note, main
from benchmarks.ring.bare_engine import STREAM_INTERVAL, BareEngine, measured
from buffer.record.episode import PolicyVersion
from tests.actors.support.tiny_model import perturb, stage
from tests.gpu.support.training_on_cards import QWEN3_600M

PROMPT = 64
COMPLETIONS = {"": 256, "_short": 32}
"""Suffix of an arm -> tokens of a reply. Short ones are like the ring's: of these an engine makes
fewer a second, since it takes in and ends eight times as many requests."""
GROUP = 16
"""Requests with the same prompt, as in the ring."""
START_S = 300.0
NUMBERS = count()


class OurEngine:
    """The engine of an actor, which always has the same number of requests running."""

    def __init__(self, stepper: VllmStepper, concurrency: int) -> None:
        self._requests: Iterator[GenerationRequest] = iter(())
        self._concurrency = concurrency
        self._running = 0
        self._runner = asyncio.Runner()
        length = stepper._options.max_model_len
        self._threaded = ThreadedEngine(stepper, max_model_len=length, start_timeout_s=START_S)

    def ask(self, requests: Iterator[GenerationRequest]) -> None:
        """Take requests from here from now on."""
        self._requests = requests

    def start(self) -> None:
        self._runner.run(self._threaded.start())

    def run(self, seconds: float) -> tuple[int, float]:
        """Generate for so long; returns tokens, and no CPU seconds."""
        return self._runner.run(self._generate(seconds)), 0.0

    def stop(self) -> None:
        """Drop what runs."""
        self._runner.run(self._threaded.halt())
        self._running = 0

    def swap(self, staged: StagedWeights, *, is_busy: bool) -> float:
        """Load a version, with or without requests in the midst of their replies; the pause."""

        async def story() -> float:
            if is_busy:
                await self._generate(0.5)
            return await self._threaded.apply(staged)

        pause_s = self._runner.run(story())
        if is_busy:
            self.stop()
        return pause_s

    def stale(self, staged: StagedWeights) -> list[str] | None:
        """Name the parameters that are not of this version."""
        return self._runner.run(self._threaded.read_back(staged))

    def close(self) -> None:
        with suppress(Exception):
            self._runner.run(self._threaded.close())
        self._runner.close()

    async def _generate(self, seconds: float) -> int:
        tokens, began = 0, now("cpu")
        while now("cpu") - began < seconds:
            wanted = self._concurrency - self._running
            self._threaded.submit([next(self._requests) for _ in range(wanted)])
            self._running = self._concurrency
            for delta in await self._threaded.deltas():
                tokens += len(delta.token_ids)
                self._running -= delta.finish_reason is not None
        return tokens


def measure(asked: Asked, note: Note) -> None:
    """Start one core; decode by both, swap, and read back what was loaded."""
    passes, seconds, concurrency = (1, 1.0, 8) if asked.is_tiny else (3, 4.0, 256)
    folder = asked.model or _random_model(asked)
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    options = VllmOptions(
        str(folder),
        max_model_len=1024,
        dtype=dtype,
        max_concurrent=concurrency,
        in_process=asked.device == "cpu",
        kv_cache_gib=1 if asked.is_tiny else 16,
        gpu_memory_utilization=0.5,
        engine_args={"stream_interval": STREAM_INTERVAL},
    )
    began = now("cpu")
    stepper = VllmStepper(options)
    engine = OurEngine(stepper, concurrency)
    try:
        engine.start()
        note("start", {"seconds": round(now("cpu") - began, 1), "model": folder.name})
        rates: dict[str, list[float]] = {}
        for suffix, tokens in [*COMPLETIONS.items()] * passes:
            requests = _requests(folder, tokens)
            engine.ask(requests)
            bare = BareEngine(stepper._engine, requests, concurrency)
            arms: dict[str, OurEngine | BareEngine] = {"engine": engine, "bare_engine": bare}
            for name, arm in arms.items():
                work = measured(arm.run, seconds / 2, seconds)
                arm.stop()
                rate = round(work["tokens"] / work["wall_s"], 1)
                rates.setdefault(f"{name}{suffix}", []).append(rate)
        for name, of_passes in rates.items():
            figures = {"tokens_per_s": median(of_passes), "each": of_passes}
            note(name, figures | {"model": folder.name})
        swap(engine, folder, asked, dtype, note)
    finally:
        engine.close()


def swap(engine: OurEngine, folder: Path, asked: Asked, dtype: str, note: Note) -> None:
    """Swap with and without requests, in turns; the versions lie in two files, as a learner's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(asked.device)
    pauses: dict[str, list[float]] = {"idle": [], "busy": []}
    for number in range(1, 5 if asked.is_tiny else 13):
        perturb(model, seed=number, scale=1e-3)
        path = asked.folder / f"version-{number % 2}"
        staged = stage(model, path, PolicyVersion(0, number), dtype=dtype)
        kind = "busy" if number % 2 else "idle"
        pauses[kind].append(round(engine.swap(staged, is_busy=kind == "busy"), 4))
    stale, num_bytes = engine.stale(staged), staged.manifest.num_bytes
    for kind, each in pauses.items():
        pause_s = median(each[1:])  # the first one makes the plan of the others
        rate = round(num_bytes / pause_s / 1e9, 2)
        figures = {"pause_s": pause_s, "each_s": each, "bytes": num_bytes, "gb_s": rate}
        note(f"swap_{kind}", figures | {"stale": stale})


def _requests(folder: Path, tokens: int) -> Iterator[GenerationRequest]:
    """Yield requests of random tokens, without an end; no two of one process have one name."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    drawn = np.random.default_rng(1)
    while True:
        prompt = tuple(drawn.integers(3, vocabulary, size=PROMPT).tolist())
        for number in islice(NUMBERS, GROUP):
            yield GenerationRequest(str(number), prompt, tokens, 1.0, ())


def _random_model(asked: Asked) -> Path:
    folder = asked.folder / ("tiny" if asked.is_tiny else "qwen3-0.6b")
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        shape = (TINY if asked.is_tiny else QWEN3_600M) | {"max_position_embeddings": 1024}
        with torch.device(asked.device):
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main(measure)
