"""vLLM with a KV cache that is too small for its requests: what an actor's number is found by."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.capacity import CacheMeter
from actors.engine.engine import GenerationRequest
from tests.actors.support.engine_probe import tiny_folder
from tests.needs import needs

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]
BLOCKS = 24  # of 32 tokens, and each request needs seven in the end
LENGTH = 200


def test_use_of_the_cache_and_evicted_requests_are_seen(tmp_path: Path) -> None:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    async def story() -> tuple[list[int], CacheMeter]:
        tiny_folder(tmp_path, tied=True)
        meter = CacheMeter()
        options = VllmOptions(
            str(tmp_path),
            max_model_len=256,
            max_concurrent=16,
            engine_args={"num_gpu_blocks_override": BLOCKS},
        )
        engine = vllm_engine(options, meter=meter)
        await engine.start()
        evicted: list[int] = []
        for count in (2, 5):
            running = {f"{count}-{number}" for number in range(count)}
            prompt = tuple(range(3, 11))
            engine.submit(
                [GenerationRequest(name, prompt, LENGTH, 1.0, ()) for name in sorted(running)]
            )
            while running:
                ended = {d.request_id for d in await engine.deltas() if d.finish_reason is not None}
                running -= ended
            assert meter.memory is not None
            evicted.append(meter.memory.evicted)
        await engine.close()
        return evicted, meter

    evicted, meter = asyncio.run(story())

    assert evicted[0] == 0, "two have room"
    assert 0 < evicted[1] < 50, "five have not"
    assert meter.memory is not None
    assert 0.0 <= meter.memory.used < 1.0
