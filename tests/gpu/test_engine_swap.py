"""Swaps in vLLM on a card, under CUDA graphs: their bytes and a step, and the learner's policy.

Graphs hold the addresses of parameters, so a swap that moved one would leave the old weights in
use. `tests/actors/engine/test_engine_vllm_unpacked.py` has all but the card and its graphs.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engine.engine import StagedWeights
from actors.engine.wire_tensors import VersionFile
from actors.weights.probe import LogprobDifference
from broker.protocol.manifest import checksum_of
from broker.weights.shared_memory import SharedFolder
from buffer.record.episode import PolicyVersion
from tests.actors.support.engine_probe import Bench
from tests.actors.support.tiny_model import stage
from tests.gpu.support.training_on_cards import QWEN3_600M, SMALL

pytestmark = pytest.mark.gpu

CARD = "cuda"
ROUNDING = LogprobDifference(0.05, 1.0)
"""Of these random models, nats; a stale matrix makes more."""
PLANNED, LAYERWISE = 20, 6
"""Swaps by the plan, and then by layerwise reload; the last of both is of the same version."""
BYTES_PER_S = 40e9
"""Of registered memory over PCIe 5, with room."""
REQUESTS, TOKENS = 16, 256
PARTS = ("pause", "load", "resume")


@pytest.mark.timeout(900)  # a first start compiles kernels and captures graphs
@pytest.mark.parametrize("shape", [SMALL, QWEN3_600M], ids=["small", "0.6B"])
def test_twenty_swaps_under_graphs_leave_the_learners_policy(
    tmp_path: Path, table: list[str], shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    # It carries functions to the worker, which this test alone does.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    torch.manual_seed(0)
    with torch.device(CARD):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).bfloat16().eval()
    model.save_pretrained(tmp_path / "model")

    async def story(folder: Path) -> str:
        engine = vllm_engine(
            VllmOptions(
                str(tmp_path / "model"),
                max_model_len=1024,
                dtype="bfloat16",
                in_process=False,
                kv_cache_gib=2,
                gpu_memory_utilization=0.3,  # must be free, beside whatever else is on the card
            )
        )
        await engine.start()
        swaps = Swaps(Bench(engine, model, tmp_path))
        try:
            await agrees(swaps.bench, model)
            step_s = await step_of(swaps.bench)
            swaps.versions = cycle([moved(model, folder / f"slot-{n}") for n in range(2)])
            planned = [await swaps.next() for _ in range(PLANNED)]
            assert swaps.way == "copied into place"
            bits = swaps.call(bits_of)
            await agrees(swaps.bench, model)

            swaps.call(forget_plan)
            layerwise = [await swaps.next() for _ in range(LAYERWISE)]
            assert swaps.call(bits_of) == bits
            await agrees(swaps.bench, model)
        finally:
            await engine.close()
        return line_of(model, step_s, planned, layerwise)

    with SharedFolder("swap", num_bytes=3 * 2**30, fallback=tmp_path) as folder:
        table.append(asyncio.run(story(folder.path)))


class Swaps:
    """Swaps of an engine in the midst of replies, with the times of their parts."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.versions: Any = None
        self._stepper: Any = bench.engine._stepper
        self._number = 0
        self._took_s: dict[str, float] = {}
        for part in PARTS:
            setattr(self._stepper, part, self._timed(part, getattr(self._stepper, part)))

    def _timed(self, part: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.monotonic()
            made = list(inner(*args) or ())
            self._took_s[part] = time.monotonic() - begun
            return made

        return call

    async def next(self) -> tuple[float, ...]:
        """Swap to the next version; return the pause, and its parts, seconds."""
        asked = self.bench.submit(*[self.bench.request(max_tokens=64) for _ in range(REQUESTS)])
        # The next steps replay graphs.
        await self.bench.read(lambda: all(t.token_ids for t in asked))
        given: StagedWeights = next(self.versions)
        self._number += 1
        version = PolicyVersion(0, self._number)
        staged = StagedWeights(given.path, replace(given.manifest, version=version))
        pause_s = await self.bench.engine.apply(staged)
        await self.bench.finish(asked)
        assert await self.bench.engine.read_back(staged) == []
        return (pause_s, *(self._took_s[part] for part in PARTS))

    @property
    def way(self) -> str:
        return str(self._stepper._way)

    def call(self, function: Callable[[Any], Any]) -> Any:
        (answer,) = self._stepper._engine.collective_rpc(function)
        return answer


def bits_of(worker: Any) -> dict[str, str]:
    """Return the checksum of every parameter of a worker."""
    return {
        name: checksum_of(bytes(parameter.detach().cpu().view(torch.uint8).numpy()))
        for name, parameter in worker.get_model().named_parameters()
    }


def forget_plan(worker: Any) -> None:
    """Leave the worker vLLM's own way alone; it is still read back by the plan."""
    live = worker._nyala_model()
    opens = live._open

    def without_parts(place: VersionFile) -> None:
        opens(place)
        live._opened = live._opened._replace(parts=None)

    live._open, live._copy = without_parts, None


@torch.no_grad()
def moved(model: Qwen3ForCausalLM, path: Path) -> StagedWeights:
    """Move every parameter, and stage the model."""
    for parameter in model.parameters():
        parameter.add_(1e-3 * torch.randn_like(parameter))
    on_host: Any = torch.nn.Module.cpu(copy.deepcopy(model))
    return stage(on_host, path, PolicyVersion(0, 1), dtype="bfloat16")


async def step_of(bench: Bench) -> float:
    """Return how long a decode step of all requests takes, seconds."""
    begun, had = 0.0, 0
    for _ in range(2):  # the first wave compiles what it needs
        asked = bench.submit(*[bench.request(max_tokens=TOKENS) for _ in range(REQUESTS)])
        await bench.read(lambda asked=asked: all(t.token_ids for t in asked))  # type: ignore[misc]
        begun, had = time.monotonic(), min(len(t.token_ids) for t in asked)
        await bench.finish(asked)
    return (time.monotonic() - begun) / (TOKENS - had)


def line_of(
    model: Qwen3ForCausalLM,
    step_s: float,
    planned: Sequence[tuple[float, ...]],
    layerwise: Sequence[tuple[float, ...]],
) -> str:
    """Return the line of the table; medians."""
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    pause, *parts = (1000 * median(each) for each in zip(*planned, strict=True))
    before = 1000 * median(each[0] for each in layerwise)
    bound = 1000 * (num_bytes / BYTES_PER_S + step_s)
    named = ", ".join(f"{part} {ms:.1f}" for part, ms in zip(PARTS, parts, strict=True))
    return (
        f"swap under graphs, {num_bytes / 2e6:6.0f}M parameters: pause {pause:.1f} ms (median of "
        f"{len(planned)}: {named}), least {1000 * min(planned)[0]:.1f}; bytes at 40 GB/s and a "
        f"step of {1000 * step_s:.1f} ms: {bound:.1f}; layer by layer {before:.1f}"
    )


async def agrees(bench: Bench, model: Qwen3ForCausalLM) -> None:
    """Compare the engine's log-probs with a forward pass in bfloat16."""
    token_ids = bench.prompt(40)
    ids = torch.tensor([token_ids], device=CARD)
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()

    found = LogprobDifference.from_logprobs(await bench.engine.probe(token_ids), expected)

    assert found.is_within(ROUNDING)
