"""Swaps in vLLM on a card, under CUDA graphs: the engine stays the learner's policy.

Graphs hold the addresses of parameters, so a swap that moved one would leave the old weights in
use. `tests/actors/engine/test_engine_vllm_unpacked.py` has all but the card and its graphs.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.weights.probe import Difference
from buffer.record.episode import PolicyVersion
from tests.actors.support.engine_probe import Bench
from tests.actors.support.tiny_model import perturb, stage
from tests.gpu.support.training_on_cards import QWEN3_600M, SMALL

pytestmark = pytest.mark.gpu

ROUNDING = Difference(0.05, 1.0)
"""Of this random model, nats; a stale matrix makes more."""


@pytest.mark.timeout(900)  # a first start compiles kernels and captures graphs
@pytest.mark.parametrize("shape", [SMALL, QWEN3_600M], ids=["small", "0.6B"])
def test_twenty_swaps_under_graphs_leave_the_learners_policy(
    tmp_path: Path, table: list[str], shape: dict[str, Any]
) -> None:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    torch.manual_seed(0)
    with torch.device("cuda"):  # where each version is drawn in no time
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).bfloat16().eval()
    model.save_pretrained(tmp_path / "model")

    async def story() -> list[float]:
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
        bench, pauses = Bench(engine, model, tmp_path), []
        try:
            await agrees(bench, model)
            for number in range(1, 21):
                # All are in the midst of a reply: the next steps replay graphs.
                asked = bench.submit(*[bench.request(max_tokens=64) for _ in range(16)])
                await bench.read(lambda asked=asked: all(t.token_ids for t in asked))  # type: ignore[misc]
                perturb(model, seed=number, scale=1e-3)
                version = PolicyVersion(0, number)
                staged = stage(model, tmp_path / f"{number % 2}", version, dtype="bfloat16")
                pauses.append(await engine.apply(staged))

                await bench.finish(asked)
                assert await engine.read_back(staged) == []
            await agrees(bench, model)
        finally:
            await engine.close()
        return pauses

    pauses = sorted(asyncio.run(story()))
    table.append(
        f"swap under graphs, {sum(p.numel() for p in model.parameters()) / 1e6:6.0f}M "
        f"parameters: pause {1000 * pauses[10]:.0f} ms (median of 20)"
    )


async def agrees(bench: Bench, model: Qwen3ForCausalLM) -> None:
    """Compare the engine's log-probs with a forward pass in bfloat16."""
    token_ids = bench.prompt(40)
    on_card = torch.nn.Module.cuda(copy.deepcopy(model))
    ids = torch.tensor([token_ids], device="cuda")
    with torch.no_grad():
        logits = on_card(ids).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()

    found = Difference.of(await bench.engine.probe(token_ids), expected)

    assert found.is_within(ROUNDING)
