"""Every architecture in vLLM and in the small engine: log-probs equal the learner's.

Run beside CI, `pytest tests/system/architectures.py`: vLLM starts once for each.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from actors.engine.torch_engine import TorchOptions, torch_engine
from actors.engine.vllm_engine import VllmOptions, vllm_engine
from learner.model.policy import Policy, load_causal_lm, probe_logprobs
from tests.learner.support.random_models import ARCHITECTURES, save_random_model

TOLERANCE = 1e-4
TOKENS = tuple(torch.randint(3, 48, (60,), generator=torch.Generator().manual_seed(0)).tolist())


@pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves
@pytest.mark.parametrize("kind", ["vllm", "torch"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_engine_scores_as_the_learner_does(tmp_path: Path, model_type: str, kind: str) -> None:
    save_random_model(tmp_path, model_type)
    expected = probe_logprobs(Policy(load_causal_lm(tmp_path), temperature=1.0), TOKENS)

    found = asyncio.run(_probe(kind, str(tmp_path)))

    assert list(found) == pytest.approx(expected, abs=TOLERANCE)


async def _probe(kind: str, model: str) -> tuple[float, ...]:
    if kind == "vllm":
        engine = vllm_engine(VllmOptions(model, max_model_len=128, max_concurrent=4))
    else:
        engine = torch_engine(TorchOptions(model, max_model_len=128, max_concurrent=4))
    await engine.start()
    try:
        return await engine.probe(TOKENS)
    finally:
        await engine.close()
