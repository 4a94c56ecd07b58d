"""A saved model, read part by part, beside what transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.errors import SettingsError
from learner.model import saved_model
from learner.model.ranks import Ranks
from learner.model.saved_model import (
    TensorFiles,
    check_first_layers,
    empty_causal_lm,
    load_causal_lm,
)
from tests.learner.support.random_models import (
    FAMILIES,
    differences,
    make_random_model,
    save_in_files,
)

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("small_files", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_equals_what_transformers_loads(
    tmp_path: Path, ranks: Ranks, family: str, *, small_files: bool
) -> None:
    save_in_files(tmp_path, family, tied=small_files, small_files=small_files)

    assert len(list(tmp_path.glob("*.safetensors"))) > small_files
    assert differences(tmp_path, None) == []
    assert differences(tmp_path, ranks.mesh) == []


def _buffers_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_model, "allocate", lambda m, device: m.to_empty(device=device))
    monkeypatch.setattr("tests.learner.support.random_models.allocate", saved_model.allocate)


def _ties_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "tie_weights", lambda _, **__: None)


def _rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TensorFiles.read

    def read(self: TensorFiles, name: str, local: torch.Tensor, offset: tuple[int, ...]) -> int:
        found = right(self, name, local, offset)
        local.copy_(local.half())
        return found

    monkeypatch.setattr(TensorFiles, "read", read)


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "buffers without their values": ("model.rotary_emb.inv_freq", _buffers_lost),
    "rounded to 16 bits": ("model.norm.weight", _rounded),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tensor, seed = WRONG[name]
    save_in_files(tmp_path, "qwen3", tied=False)
    _change(tmp_path / WEIGHTS, lambda tensors: tensors["model.norm.weight"].fill_(1 / 3))

    seed(monkeypatch)

    assert tensor in differences(tmp_path, None)


def test_a_tie_that_is_lost_leaves_a_weight_without_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_files(tmp_path, "qwen3")

    _ties_lost(monkeypatch)

    with pytest.raises(SettingsError, match=r"run.model must hold lm_head.weight"):
        differences(tmp_path, None)


def _change(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_of_a_base_model_and_both_names_of_a_tie_are_accepted(tmp_path: Path) -> None:
    model = make_random_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    _change(
        tmp_path / WEIGHTS,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert differences(tmp_path, None) == []

    model.model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / WEIGHTS))
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert differences(tmp_path, None) == []


def _two_that_should_be_tied(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _row_missing(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"hold model.norm.weight .* got none"),
        (_row_missing, r"must hold model.norm.weight of shape \(64,\), .* got \(63,\)"),
        (_two_that_should_be_tied, "set tie_word_embeddings to false"),
    ],
)
def test_files_that_do_not_hold_the_model_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], match: str
) -> None:
    save_in_files(tmp_path, "llama")
    _change(tmp_path / WEIGHTS, change)

    with pytest.raises(SettingsError, match=match):
        differences(tmp_path, None)


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    save_in_files(tmp_path, "llama")
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(SettingsError, match=r"no model\.safetensors; save it again"):
        load_causal_lm(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    save_in_files(tmp_path, "llama")
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-1])

    with pytest.raises(SettingsError, match=r"run.model must be a Hugging Face model directory"):
        load_causal_lm(tmp_path)


def test_an_unsupported_architecture_is_refused_with_its_own_reason(tmp_path: Path) -> None:
    save_in_files(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))

    with pytest.raises(SettingsError, match=r"^run\.model must be a dense model"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("llama", {"num_hidden_layers": 3}, 1),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, 4),
    ],
)
def test_layers_are_checked_up_to_the_last_new_kind_with_their_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    layers: int,
) -> None:
    number = len(changes.get("layer_types", range(3)))
    make_random_model(family, **{"num_hidden_layers": number} | changes).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    checked: list[nn.Module] = []
    monkeypatch.setattr(saved_model, "check_packing", checked.append)

    empty = empty_causal_lm(tmp_path)
    check_first_layers(empty, tmp_path)

    (first,) = checked
    assert sum(1 for _ in first.get_submodule("model.layers").children()) == layers
    assert len(empty.base_model.layers) == empty.config.num_hidden_layers == number
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)[: parameter.shape[0]])
    assert all(parameter.is_meta for parameter in empty.parameters())
