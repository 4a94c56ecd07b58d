"""The probe's law of vLLM in bfloat16 on a CPU, whose learner computes in float32.

The twin of `tests/gpu/test_probes.py`: all but the card, its graphs and the learner's kernels.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest

from learner.model.policy import Policy
from tests.actors.support.engine_probe import tiny_folder
from tests.needs import needs
from tests.weights.support.vllm_probes import only_right_weights_pass

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


def test_right_weights_pass_and_exchanged_layers_do_not(tmp_path: Path) -> None:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    model = tiny_folder(tmp_path / "model", tied=True)
    policy = Policy(copy.deepcopy(model), temperature=1.0).eval()

    async def story() -> None:
        engine = vllm_engine(
            VllmOptions(str(tmp_path / "model"), max_model_len=256, dtype="bfloat16")
        )
        await engine.start()
        await only_right_weights_pass(engine, model, policy, tmp_path)
        await engine.close()

    asyncio.run(story())
