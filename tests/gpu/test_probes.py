"""The probe's law on a card: vLLM under CUDA graphs, and a learner in bfloat16 with its kernels.

`tests/weights/vllm/test_vllm_probes.py` has the like on a CPU.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from tests.weights.support.vllm_probes import only_right_weights_pass

pytestmark = pytest.mark.gpu

SMOLLM2_135M: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,  # so that distributions are far from uniform
}


@pytest.mark.timeout(900)  # a first start compiles kernels and captures graphs
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_right_weights_pass_and_exchanged_layers_do_not(
    tmp_path: Path, table: list[str], card: Ranks, is_eager: bool
) -> None:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).eval()
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path / "model")
    policy = Policy(copy.deepcopy(model), temperature=1.0).eval()
    shard(policy, card.mesh, dtype=torch.bfloat16)

    async def story() -> list[str]:
        engine = vllm_engine(
            VllmOptions(
                str(tmp_path / "model"),
                max_model_len=256,
                dtype="bfloat16",
                in_process=False,
                kv_cache_gib=2,
                engine_args={"enforce_eager": True} if is_eager else {},
            )
        )
        await engine.start()
        try:
            return await only_right_weights_pass(engine, model, policy, tmp_path)
        finally:
            await engine.close()

    _, shown, over, largest = asyncio.run(story())
    table.append(
        f"probes of SmolLM2-135M's shapes in bfloat16, {'eager' if is_eager else 'graphs'}: nats "
        f"{shown}; over what is foretold {over} on average, {largest} at most (least, middle, "
        f"largest)"
    )
