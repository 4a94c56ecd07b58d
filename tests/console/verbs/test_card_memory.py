"""Computed memory of the learner: against a real step, a real model's size, and known cards."""

from __future__ import annotations

import ctypes
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.learner.arm import measure
from configs.errors import SettingsError
from configs.settings import AlgorithmSettings, LearnerSettings, RunSettings, Settings
from console.run.card_memory import CHUNKS, GIB, LARGE, ModelShape, card_memory
from console.verbs import up
from learner.data.batch import pack, plan_batch
from learner.model import activation_checkpointing
from learner.model.activation_checkpointing import Kept
from learner.model.output_layer import CHUNK_SIZES
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.training.optimizer import AdamWithSchedule
from learner.training.step import train_batch
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.random_models import ARCHITECTURES, SIZE
from tests.learner.support.tiny_policy import constant_rate, save_tiny_model

QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
M_MMAP_THRESHOLD = -3
MIDDLE = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
}
MULTI_GPU = Path(__file__).parents[3] / "configs" / "multi-gpu.yaml"


def _multi_gpu(parallel: dict[str, int] | None = None, **learner: Any) -> Settings:
    raw = yaml.safe_load(MULTI_GPU.read_text())
    raw["learner"] |= learner
    raw["parallel"] = parallel or {}
    return Settings.model_validate(raw)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "granite"])
def test_parameters_are_counted(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](**SIZE | ARCHITECTURES[model_type])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    shape = ModelShape.of(json.loads(config.to_json_string(use_diff=False)))

    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_activations_of_a_layer_are_those_counted_with_saved_tensors() -> None:
    four = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}

    assert ModelShape.of(four).kept("none", 2) == 170_280
    assert ModelShape.of(four).kept("full", 2) == 5_120
    assert 4.0e9 < ModelShape.of(four).parameters < 4.1e9


def test_eight_billion_parameters_fit_four_cards_of_80_gb_with_full_checkpointing_alone() -> None:
    fits = card_memory(_multi_gpu(), QWEN3_8B, on_gpu=True)
    plain = card_memory(_multi_gpu(activation_checkpointing="none"), QWEN3_8B, on_gpu=True)

    assert fits.kind == "full" and fits.total < 60 * GIB
    fits.check(80 * 10**9)
    assert plain.step["activations"] == pytest.approx(118 * GIB, rel=0.01)
    with pytest.raises(SettingsError, match=r"must fit 74.5 GiB .* got 155.3 GiB .*: full$"):
        plain.check(80 * 10**9)
    with pytest.raises(SettingsError, match=r"set learner.ranks above 4"):
        fits.check(20 * GIB)
    halves = {"replicate": 2, "sequence": 2}
    shared = card_memory(_multi_gpu(halves), QWEN3_8B, on_gpu=True)
    assert shared.step["activations"] * 2 == fits.step["activations"]
    assert shared.states["gradients"] == 2 * fits.states["gradients"]
    wide = card_memory(_multi_gpu(microbatch_tokens=65536), QWEN3_8B, on_gpu=True)
    with pytest.raises(SettingsError, match=r"set learner.microbatch_tokens below 65536"):
        wide.check(60 * GIB)


@pytest.mark.parametrize(("device", "card_gib"), [("cpu", 0.001), ("auto", None)])
def test_without_a_card_the_memory_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, card_gib: float | None
) -> None:
    monkeypatch.setattr(up, "smallest_card", lambda: None)
    console = Console(file=io.StringIO(), width=200)

    up.say_card_memory(console, _tiny(tmp_path, device), card_gib)

    assert "GiB  moments" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_card_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"the learner must fit 0\.0 GiB on each card"):
        up.say_card_memory(Console(file=io.StringIO()), _tiny(tmp_path, "auto"), 0.001)


def _tiny(folder: Path, device: str) -> Settings:
    save_tiny_model(folder)
    run = RunSettings(model=str(folder), environment="calculator")
    learner = LearnerSettings.model_validate({"device": device})
    return Settings(run=run, learner=learner)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "full"])
def test_computed_memory_is_that_of_a_real_step(ranks: Ranks, kind: Kept) -> None:
    prompt, completion = 64, 128
    episodes = [
        make_episode(n, prompt=range(prompt), completion=range(completion), reward=n % 2)
        for n in range(8)
    ]
    tokens = len(episodes) * (prompt + completion)
    learner = LearnerSettings(microbatch_tokens=tokens, activation_checkpointing=kind)
    run = RunSettings(
        model="init",
        environment="calculator",
        dtype="float32",
        max_prompt_tokens=prompt,
        max_completion_tokens=completion,
    )
    shape = MIDDLE | {"tie_word_embeddings": True, "model_type": "qwen3"}
    computed = card_memory(Settings(run=run, learner=learner), shape, on_gpu=False).total

    def train_twice() -> None:
        causal_lm = Qwen3ForCausalLM(Qwen3Config(**MIDDLE))
        policy = Policy(causal_lm, temperature=1.0).eval()
        shard(policy, ranks.mesh, dtype=torch.float32, activations=kind)
        optimizer = AdamWithSchedule(policy, constant_rate(1e-6), learner)
        settings = AlgorithmSettings()
        plan = plan_batch(
            1,
            episodes,
            ranks=1,
            settings=settings,
            max_completion_tokens=completion,
            microbatch_tokens=tokens,
        )
        for step in (1, 2):
            microbatches = pack(plan, episodes, settings=settings, lineages={1: 0}, lineage=1)
            train_batch(policy, optimizer, step, microbatches, settings=settings, ranks=ranks)

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed leaves the process at once
    measured = measure(train_twice)["peak_mib"] * 2**20

    assert 0.8 < computed / measured < 1.25


def test_constants_are_those_of_the_learner() -> None:
    assert dict(CHUNK_SIZES) == CHUNKS
    assert LARGE == activation_checkpointing.LARGE
