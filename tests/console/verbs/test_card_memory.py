"""Computed memory of the learner: against a real step, a real model's size, and known cards."""

from __future__ import annotations

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

from configs.errors import SettingsError
from configs.settings import LearnerSettings, RunSettings, Settings
from console.run.card_memory import GIB, CardMemory, card_memory
from console.run.checks import model
from console.run.decoder_sizes import FUSED, ModelShape
from console.verbs import up
from learner.model.activations import Kept
from learner.model.fused import FAMILIES
from learner.model.lora import adapt
from learner.model.ranks import Ranks
from tests.gpu.support import training_on_cards as on_cards
from tests.gpu.support.training_on_cards import LOAD_OF_PEAKS, PEAKS
from tests.learner.support.random_models import ARCHITECTURES, SIZE
from tests.learner.support.ranks.measured_step import MIDDLE, peak_bytes, settings_of
from tests.learner.support.ranks.several_ranks import run_ranks
from tests.learner.support.tiny_policy import save_tiny_model

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
QWEN2_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
MULTI_GPU = Path(__file__).parents[3] / "configs" / "multi-gpu.yaml"


QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_06B = QWEN3_8B | {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
ONE_GPU = MULTI_GPU.with_name("qwen3-0.6b.yaml")
SMALL_CARD_GIB = 22.5
"""Of the smallest cards that are sold with 24 GB."""
CARD_BYTES = int(79.18 * GIB)
"""Of the H100 of the measured figures."""
ENGINE_GIB = 3.0
"""Of vLLM besides weights and KV cache: activations, CUDA graphs; and two CUDA contexts."""


def test_the_preset_of_one_gpu_fits_learner_and_actor_on_its_smallest_card() -> None:
    settings = Settings.model_validate(yaml.safe_load(ONE_GPU.read_text()))
    card_bytes = int(SMALL_CARD_GIB * GIB)

    memory = card_memory(settings, QWEN3_06B, on_gpu=True, card_bytes=card_bytes)
    weights = 2 * ModelShape.from_config(QWEN3_06B).parameters

    assert settings.actors.kv_cache_gib is not None
    engine = (settings.actors.kv_cache_gib + ENGINE_GIB) * GIB + weights
    assert memory.total + engine < 0.9 * card_bytes
    # What the engine asks for at its start is free even at the learner's peak.
    assert memory.total + settings.actors.gpu_memory_utilization * card_bytes < card_bytes
    without = _with(settings, activation_checkpointing="none")
    assert card_memory(without, QWEN3_06B, on_gpu=True).total + engine > card_bytes


def test_the_preset_of_eight_gpus_leaves_room_on_cards_of_80_gib() -> None:
    memory = card_memory(_multi_gpu(), QWEN3_8B, on_gpu=True, card_bytes=80 * GIB)

    assert memory.total < 0.75 * 80 * GIB


def _with(settings: Settings, **learner: Any) -> Settings:
    return settings.model_copy(update={"learner": settings.learner.model_copy(update=learner)})


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

    shape = ModelShape.from_config(json.loads(config.to_json_string(use_diff=False)))

    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_activations_of_a_layer_are_those_counted_with_saved_tensors() -> None:
    four = ModelShape.from_config(QWEN3_4B)

    assert four.kept("none", 2) == 170_280
    assert four.kept("full", 2) == 5_120
    assert four.kept("none", 2, is_fused=True) == 109_864
    assert 4.0e9 < four.parameters < 4.1e9


def test_types_whose_norms_and_gates_are_kernels_are_those_that_the_learner_knows() -> None:
    assert {kind.removesuffix("_text") for kind in FUSED} == {name.lower() for name in FAMILIES}


MEASURED_MIB = {
    "none": 1352,
    "compile": 1334,
    "compile, full": 888,
    "full": 877,
    "selective": 1176,
    "inputs in host memory": 849,
    "parameters in host memory": 995,
    "both": 518,
    "adamw8bit": 1188,
    "adapters": 998,
}
"""At the peak of a step of `tests/gpu/test_switches.py`: one H200, torch 2.11, 27 November 2026."""


@pytest.mark.parametrize("name", MEASURED_MIB)
def test_computed_memory_is_what_a_card_had_at_its_peak(name: str) -> None:
    settings = on_cards.settings_of(LOAD_OF_PEAKS, PEAKS[name], "bfloat16")

    computed = card_memory(settings, on_cards.SMALL, on_gpu=True, card_bytes=CARD_BYTES)

    assert computed.total / 2**20 == pytest.approx(MEASURED_MIB[name], rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "compiles", "measured_gib"),
    [(16384, False, 66.1), (16384, True, 67.16)],
)
def test_computed_memory_of_four_billion_parameters_is_what_a_card_had(
    tokens: int, measured_gib: float, *, compiles: bool
) -> None:
    """The learner's step alone, `full`, episodes of 2,048 tokens; compiled on an H100."""
    load = on_cards.Load(episodes=16, prompt=2, completion=2046, microbatch_tokens=tokens)
    switches = {"activation_checkpointing": "full", "compile": compiles}

    computed = card_memory(on_cards.settings_of(load, switches, "bfloat16"), QWEN3_4B, on_gpu=True)

    assert computed.total / GIB == pytest.approx(measured_gib, rel=0.15)


def test_eight_billion_parameters_fit_four_cards_of_80_gb_with_full_checkpointing_alone() -> None:
    fits = card_memory(_multi_gpu(), QWEN3_8B, on_gpu=True)
    plain = card_memory(_multi_gpu(activation_checkpointing="none"), QWEN3_8B, on_gpu=True)

    assert fits.kind == "full" and fits.total < 60 * GIB
    fits.check_fit(80 * 10**9)
    assert plain.step["activations"] == pytest.approx(75.5 * GIB, rel=0.01)
    with pytest.raises(SettingsError, match=r"must fit 74.5 GiB .* got 113.5 GiB .*: full$"):
        plain.check_fit(80 * 10**9)
    with pytest.raises(SettingsError, match=r"set learner.ranks above 4"):
        fits.check_fit(20 * GIB)
    halves = {"replicate": 2, "sequence": 2}
    shared = card_memory(_multi_gpu(halves), QWEN3_8B, on_gpu=True)
    assert shared.step["activations"] * 2 == fits.step["activations"]
    assert shared.states["gradients"] == 2 * fits.states["gradients"]
    wide = card_memory(_multi_gpu(microbatch_tokens=65536), QWEN3_8B, on_gpu=True)
    with pytest.raises(SettingsError, match=r"set learner.microbatch_tokens below 65536"):
        wide.check_fit(60 * GIB)


def test_moments_in_8_bits_are_a_quarter() -> None:
    plain, small = (
        card_memory(_multi_gpu(optimizer=kind), QWEN3_8B, on_gpu=True).states["moments"]
        for kind in ("adamw", "adamw8bit")
    )

    assert small == pytest.approx(plain / 4 * (1 + 4 / 256), rel=1e-6)


def test_divided_matrices_take_a_part_of_each_card() -> None:
    whole = card_memory(_multi_gpu({"shard": 1}, ranks=1), QWEN3_8B, on_gpu=True)
    parts = card_memory(_multi_gpu({"tensor": 4}, ranks=4), QWEN3_8B, on_gpu=True)

    for name, size in whole.states.items():
        assert parts.states[name] == pytest.approx(size / 4, rel=1e-3)
    gathered = "gathered weights, and the output layer's gradient"
    assert parts.step[gathered] == pytest.approx(whole.step[gathered] / 4, rel=1e-3)
    assert parts.step["hidden states"] == whole.step["hidden states"]
    assert parts.publication == whole.publication, "gathered tensor by tensor"


def test_one_card_keeps_its_layers_in_16_bits_where_it_keeps_their_activations() -> None:
    name = "weights of the other layers in 16 bits"
    none: dict[str, Any] = {"activation_checkpointing": "none"}
    one = card_memory(_multi_gpu(ranks=1, **none), QWEN3_8B, on_gpu=True)
    others: list[dict[str, Any]] = [
        none | {"ranks": 4},
        none | {"ranks": 1, "compile": True},
        none | {"ranks": 1, "offload": ["parameters"]},
        {"ranks": 1, "activation_checkpointing": "full"},
    ]

    assert one.step[name] == 2 * 34 * ModelShape.from_config(QWEN3_8B).layer_parameters
    for each in others:
        assert name not in card_memory(_multi_gpu(**each), QWEN3_8B, on_gpu=True).step


def test_logits_in_float32_take_more_than_those_in_bfloat16() -> None:
    narrow = _multi_gpu()
    wide = narrow.model_copy(
        update={"run": narrow.run.model_copy(update={"head_dtype": "float32"})}
    )
    chunks = [card_memory(settings, QWEN3_8B, on_gpu=True).loss for settings in (narrow, wide)]

    assert chunks[1] == 3 * chunks[0], "the wide ones, and their gradient as it was"


def test_adapters_alone_have_gradients_and_moments() -> None:
    whole = card_memory(_multi_gpu(), QWEN3_8B, on_gpu=True)
    adapted = card_memory(_multi_gpu(lora_rank=16, base_dtype="float32"), QWEN3_8B, on_gpu=True)
    settings = _multi_gpu(lora_rank=16).model_dump() | {"critic": {"kind": "model"}}
    settings["algorithm"] |= {"advantage": "gae", "proximal": "recomputed"}
    with_critic = card_memory(Settings.model_validate(settings), QWEN3_8B, on_gpu=True)

    share = adapted.states["adapters"]
    assert share == 43_646_976
    assert adapted.states["weights, float32"] == whole.states["weights, float32"]
    assert adapted.states["gradients"] == share and adapted.states["moments"] == 2 * share
    assert adapted.reduction < whole.reduction / 50
    gradients = with_critic.states["gradients"]
    assert gradients == pytest.approx(whole.states["gradients"] + share, abs=4)


def _with_critic(**critic: Any) -> CardMemory:
    settings = _multi_gpu(activation_checkpointing="full").model_dump()
    settings |= {"critic": {"kind": "model", **critic}}
    settings["algorithm"] |= {"advantage": "gae", "proximal": "recomputed"}
    return card_memory(Settings.model_validate(settings), QWEN3_8B, on_gpu=True)


def test_policy_and_critic_have_their_activations_one_after_the_other() -> None:
    alone = card_memory(_multi_gpu(activation_checkpointing="full"), QWEN3_8B, on_gpu=True)
    same, half, double = (
        _with_critic(microbatch_tokens=tokens)
        for tokens in (None, alone.tokens // 2, 2 * alone.tokens)
    )

    assert same.step["activations"] == half.step["activations"] == alone.step["activations"]
    assert double.step["activations"] == 2 * alone.step["activations"]
    assert (half.critic_tokens, double.critic_tokens) == (None, 2 * alone.tokens)
    assert double.tokens == alone.tokens
    large = _with_critic(microbatch_tokens=16 * alone.tokens)
    with pytest.raises(
        SettingsError, match=f"set critic.microbatch_tokens below {large.critic_tokens}"
    ):
        large.check_fit(large.total - 1)


def test_a_critic_in_host_memory_leaves_the_policy_on_the_card() -> None:
    alone = card_memory(_multi_gpu(activation_checkpointing="full"), QWEN3_8B, on_gpu=True)

    memory = _with_critic(offload=["parameters"])

    for name in ("weights, float32", "gradients", "moments"):
        assert memory.states[name] == memory.host[name] == alone.states[name]


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
def test_a_frozen_model_takes_what_is_computed(base: str) -> None:
    shape = MIDDLE | {"tie_word_embeddings": True, "model_type": "qwen3"}
    causal_lm = Qwen3ForCausalLM(Qwen3Config(**MIDDLE, tie_word_embeddings=True))
    adapt(causal_lm, LearnerSettings(lora_rank=8), base)

    frozen = sum(p.nbytes for p in causal_lm.parameters() if not p.requires_grad)

    assert frozen == ModelShape.from_config(shape).kept_bytes(base)


@pytest.mark.parametrize(("base", "gib"), [(None, 18.8), ("nf4", 10.2)])
def test_a_card_of_24_gb_trains_adapters_of_seven_billion_parameters(
    base: str | None, gib: float
) -> None:
    load = on_cards.Load(episodes=64, prompt=512, completion=1536, microbatch_tokens=8192)
    learner = {"lora_rank": 16, "base_dtype": base}
    settings = on_cards.settings_of(load, learner, "bfloat16")
    algorithm = settings.algorithm.model_copy(update={"kl_coefficient": 0.1})
    settings = settings.model_copy(update={"algorithm": algorithm})
    wide = settings.model_copy(update={"learner": _with(settings, base_dtype="float32").learner})

    computed = card_memory(settings, QWEN2_7B, on_gpu=True)

    assert "weights of the reference" not in computed.states, "it is the frozen model itself"
    assert computed.total / GIB == pytest.approx(gib, abs=0.05)
    computed.check_fit(int(SMALL_CARD_GIB * GIB))
    with pytest.raises(SettingsError, match=r"learner\.base_dtype: nf4"):
        card_memory(wide, QWEN2_7B, on_gpu=True).check_fit(int(SMALL_CARD_GIB * GIB))


def test_moments_of_muon_are_sharded_as_weights_are() -> None:
    shards, copies = (
        card_memory(_multi_gpu(parallel, optimizer="muon"), QWEN3_8B, on_gpu=True).states
        for parallel in ({}, {"replicate": 2})
    )

    assert shards["moments"] < 1.5 * shards["weights, float32"]
    assert copies["moments"] == pytest.approx(2 * shards["moments"], rel=1e-6)


def test_offloaded_parameters_leave_the_card_for_host_memory() -> None:
    plain = card_memory(_multi_gpu(ranks=1), QWEN3_8B, on_gpu=True)
    offloaded = card_memory(
        _multi_gpu(ranks=1, offload=["parameters"]), QWEN3_8B, on_gpu=True, card_bytes=80 * GIB
    )

    assert not offloaded.states and offloaded.host == plain.states
    assert offloaded.total < plain.total - 0.9 * sum(plain.states.values())
    assert any("in host memory" in line for line in offloaded.lines())
    with pytest.raises(SettingsError, match=r"or learner\.offload: \[parameters\]"):
        plain.check_fit(80 * GIB)
    offloaded.check_fit(80 * GIB)
    inputs = _multi_gpu(ranks=1, offload=["parameters", "activations"])
    both = card_memory(inputs, QWEN3_8B, on_gpu=True, card_bytes=80 * GIB)
    assert both.host["activations"] == offloaded.step["activations"]
    assert both.step["activations"] == 3 * both.host["activations"] // 36
    assert both.total <= offloaded.total
    on_cpu = _multi_gpu(ranks=1, offload=["parameters"])
    assert card_memory(on_cpu, QWEN3_8B, on_gpu=False).states == plain.states


@pytest.mark.parametrize(("device", "card_gib"), [("cpu", 0.001), ("auto", None)])
def test_without_a_card_the_memory_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, card_gib: float | None
) -> None:
    monkeypatch.setattr(up, "smallest_card", lambda: None)
    console = Console(file=io.StringIO(), width=200)

    up.say_card_memory(console, _tiny(tmp_path, device), card_gib)

    assert "GiB  at most at a time" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_card_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"the learner must fit 0\.0 GiB on each card"):
        up.say_card_memory(Console(file=io.StringIO()), _tiny(tmp_path, "auto"), 0.001)


def _tiny(folder: Path, device: str) -> Settings:
    save_tiny_model(folder)
    run = RunSettings(model=str(folder), environment="calculator")
    learner = LearnerSettings.model_validate({"device": device})
    return Settings(run=run, learner=learner)


def _assert_computed(settings: Settings, measured: int) -> None:
    shape = MIDDLE | {"tie_word_embeddings": True, "model_type": "qwen3"}
    assert 0.8 < card_memory(settings, shape, on_gpu=False).total / measured < 1.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "base"),
    [("none", 0, None), ("full", 0, None), ("none", 8, None), ("none", 8, "nf4")],
)
def test_computed_memory_is_that_of_a_real_step(
    ranks: Ranks, kind: Kept, rank: int, base: str | None
) -> None:
    settings = settings_of(ranks=1, microbatches=1, kind=kind, lora_rank=rank, base_dtype=base)

    _assert_computed(settings, peak_bytes(ranks, settings))


@pytest.mark.slow
def test_computed_memory_is_that_of_two_ranks_that_reduce_gradients_once(tmp_path: Path) -> None:
    run_ranks(tmp_path, ("measured_step", 2))

    measured = json.loads((tmp_path / "peak.json").read_text())

    _assert_computed(settings_of(ranks=2, microbatches=2), measured)


def test_what_is_kept_until_gradients_are_reduced_is_counted_where_there_is_room() -> None:
    small = QWEN3_8B | {"num_hidden_layers": 2, "vocab_size": 32_000}
    kept = "all weights and gradients, until these are reduced"

    def computed(card_gib: int, ranks: int) -> CardMemory:
        settings = _multi_gpu(ranks=ranks)
        return card_memory(settings, small, on_gpu=True, card_bytes=card_gib * GIB)

    assert kept in computed(80, 2).step
    assert kept not in computed(20, 2).step, "5.2 GiB in float32 are more than a fifth of it"
    assert kept not in computed(80, 1).step, "one rank has nothing to reduce"
    assert computed(80, 2).total > computed(20, 2).total


def test_a_run_is_refused_before_it_starts_where_the_card_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _tiny(tmp_path / "model", "auto")
    config = tmp_path / "run.yaml"
    raw = {"name": "small", "directory": str(tmp_path / "runs"), "environment": "calculator"}
    config.write_text(yaml.safe_dump({"run": raw | {"model": settings.run.model}}))
    monkeypatch.setattr(model, "smallest_card", lambda: 2**20)
    monkeypatch.setattr(up, "check_start", lambda *_, **__: [])
    console = Console(file=io.StringIO())

    with pytest.raises(SettingsError, match=r"the learner must fit 0\.0 GiB on each card"):
        up.start(up.Launch(config), console)

    assert "moments" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert not (tmp_path / "runs" / "small" / "config.yaml").exists()
