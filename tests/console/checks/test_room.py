"""Room for a model: shared memory, disk and memory that are too small for it."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from broker.weights.shared_memory import SHARED_MEMORY
from configs.errors import SettingsError
from configs.settings import Settings
from console.run.checks import model
from console.run.checks.check import GIB, Doubt

QWEN3 = {  # of Qwen3-0.6B: 596,049,920 parameters
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
PARAMETERS = 596_049_920


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    run = {"model": str(tmp_path / "model"), "environment": "calculator", "directory": tmp_path}
    return Settings.model_validate({"run": run | {"dtype": "bfloat16"}})


@pytest.fixture
def free(monkeypatch):
    """Choose the free bytes of shared memory and of every disk."""
    usage = type(shutil.disk_usage("/"))

    def set_to(*, shared: int, disk: int) -> None:
        def look(place):
            found = shared if place == SHARED_MEMORY else disk
            return usage(1000 * GIB, 1000 * GIB - found, found)

        monkeypatch.setattr(shutil, "disk_usage", look)

    return set_to


def test_sizes_are_those_of_the_model(settings):
    assert model.sizes_of(settings) == (2 * PARAMETERS, 12 * PARAMETERS)


def test_three_copies_of_the_weights_must_fit_shared_memory_or_the_disk(settings, free):
    free(shared=4 * GIB, disk=100 * GIB)
    assert "3 copies of the weights take 3.7 GiB, 4.0 GiB" in model.check_shared_memory(settings)

    free(shared=64 * 2**20, disk=100 * GIB)
    found = model.check_shared_memory(settings)
    assert isinstance(found, Doubt)
    assert "should have 3.7 GiB free" in found.text
    assert "--shm-size" in found.text

    free(shared=64 * 2**20, disk=GIB)
    with pytest.raises(SettingsError, match=r"must have 3.7 GiB free .*got 64.0 MiB, and 1.0 GiB"):
        model.check_shared_memory(settings)


def test_checkpoints_must_fit_the_disk_beside_those_that_are_there(settings, free):
    wanted = (3 + 1) * 12 * PARAMETERS + 2 * PARAMETERS + GIB
    free(shared=0, disk=wanted)
    assert model.check_disk(settings).startswith("4 checkpoints of 6.7 GiB")

    free(shared=0, disk=wanted - 2**20)
    with pytest.raises(SettingsError, match=r"4 checkpoints of 6.7 GiB.*lower learner.keep_checkp"):
        model.check_disk(settings)

    held = settings.run.folder / "checkpoints" / "step-000001" / "shard"
    held.parent.mkdir(parents=True)
    held.write_bytes(bytes(2**20))
    assert model.check_disk(settings)


def test_a_learner_larger_than_this_machine_is_warned_of(settings, monkeypatch):
    monkeypatch.setattr(model, "smallest_card", lambda: None)
    monkeypatch.setattr(os, "sysconf", lambda _name: 2**14)

    found = model.check_learner_memory(settings)

    assert isinstance(found, Doubt)
    assert "this machine's memory of 256.0 MiB" in found.text


def test_a_learner_larger_than_the_card_fails(settings, monkeypatch):
    monkeypatch.setattr(model, "smallest_card", lambda: 8 * GIB)
    with pytest.raises(SettingsError, match=r"must fit 8\.0 GiB on each card"):
        model.check_learner_memory(settings)

    monkeypatch.setattr(model, "smallest_card", lambda: 80 * GIB)
    assert "of 80.0 GiB on each card, computed" in model.check_learner_memory(settings)


def test_a_model_of_unknown_size_is_one_failure(settings):
    assert model.check_size(settings) == "1.1 GiB as it is published"
    (settings.run.folder.parent / "model" / "config.json").write_text("{}")

    with pytest.raises(SettingsError, match=r"its sizes in config\.json, got none of"):
        model.check_size(settings)
