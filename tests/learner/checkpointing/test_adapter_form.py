"""Adapters in PEFT's form: PEFT and vLLM compute with them what the learner does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from configs.settings import RunSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.export import export_adapter
from learner.model.policy import probe_logprobs
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from tests.actors.support.tiny_model import make_model
from tests.learner.support.adapted_policy import adapted_policy, fill_adapters
from tests.learner.support.ranks.layouts import STATE
from tests.needs import needs

ROOT = Path(__file__).parents[3]
TOKEN_IDS = tuple(range(5, 25))
RANK, ALPHA = 3, 5.0
"""Those of `adapted_policy`."""


class Exported(NamedTuple):
    """A base, the adapter of it, and log-probs by the base alone and by the learner."""

    base: Path
    adapter: Path
    without: Sequence[float]
    trained: Sequence[float]


@pytest.fixture
def exported(tmp_path: Path, ranks: Ranks) -> Exported:
    base = tmp_path / "model"
    make_model().save_pretrained(base)
    policy, optimizer = adapted_policy(ranks, causal_lm=load_causal_lm(base))
    without = probe_logprobs(policy, TOKEN_IDS)
    fill_adapters(policy)
    saved = Checkpoints(tmp_path / "run", keep=1, ranks=ranks).save(STATE, policy, optimizer)
    run = RunSettings.model_validate({"model": str(base), "environment": "calculator"})

    export_adapter(saved, run, tmp_path / "adapter")

    trained = probe_logprobs(policy, TOKEN_IDS)
    assert trained != pytest.approx(without, abs=0.1)
    return Exported(base, tmp_path / "adapter", without, trained)


def test_files_and_names_are_those_of_peft(exported: Exported) -> None:
    config = json.loads((exported.adapter / "adapter_config.json").read_text())
    tensors = load_file(exported.adapter / "adapter_model.safetensors")

    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["base_model_name_or_path"] == str(exported.base)
    assert len(config["target_modules"]) == 7
    assert len(tensors) == 2 * 2 * 7, "A and B of seven matrices in two layers"
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    assert tensors[name.format("A")].shape == (RANK, 192)
    assert tensors[name.format("B")].shape == (64, RANK)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="run with the peers, in a step of `./run test`"
)
@pytest.mark.filterwarnings("ignore")  # PEFT's own, and those of what it imports
def test_peft_computes_with_it_what_the_learner_does(exported: Exported) -> None:
    from peft import PeftModel  # type: ignore[import-not-found]

    base = AutoModelForCausalLM.from_pretrained(exported.base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(exported.adapter))

    with torch.no_grad():
        log_pi_TV = model(torch.tensor([TOKEN_IDS])).logits[0, :-1].log_softmax(-1)
    found = log_pi_TV.gather(-1, torch.tensor(TOKEN_IDS[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(exported.trained, abs=1e-4)


@pytest.mark.live
@needs("vLLM")
def test_vllm_computes_with_it_what_the_learner_does(exported: Exported) -> None:
    module = "tests.learner.support.vllm_scores"  # vLLM would end the process group of this one
    arguments = [exported.base, exported.adapter, json.dumps(TOKEN_IDS)]
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    without, trained = json.loads(done.stdout.splitlines()[-1])
    assert without == pytest.approx(exported.without, abs=1e-4)
    assert trained == pytest.approx(exported.trained, abs=1e-4)
