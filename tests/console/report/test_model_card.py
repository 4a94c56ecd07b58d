"""The model card: front matter that the hub reads, the run's figures, and nothing private."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from configs.settings import Settings
from console.report.model_card import CARD, declarations, write_card
from console.run.run_folder import VERSIONS_FILE

SECRETS: dict[str, Any] = {
    "model": "/home/ann/base-7b",
    "environment": "dataset",
    "environment_settings": {
        "path": "/data/secret-place/questions.jsonl",
        "prompt": "question",
        "answer": "answer",
        "api_key": "sk-123",
    },
    "reward": ["/home/ann/rewards.py:exact", "lab.rewards:brief"],
    "system_prompt": "Answer.\n```\nThat is all.",
}
TABLES: dict[str, Any] = {
    "buffer": {"url": "redis://10.1.2.3:6379"},
    "broker": {"endpoint": "tcp://10.1.2.3:5757", "keys": "/home/ann/keys"},
    "learner": {"lr": 3e-5, "checkpoint_url": "s3://bucket-of-ann/x", "lr_decay": "cosine"},
    "algorithm": {"clip_high": 0.4, "kl_coefficient": 0.1, "reference_model": "/home/ann/ref-7b"},
}


def _card(folder: Path, step: int = 50, **run: object) -> Any:
    tables = {"name": "r", "directory": folder, "steps": 90, **run}
    settings = Settings.model_validate({"run": tables, **TABLES})
    settings.run.folder.mkdir()
    lines = [{"step": at, "accuracy": at / 100} for at in (0, 25, 50, 75)]
    text = "\n".join(map(json.dumps, lines))
    (settings.run.folder / "eval.jsonl").write_text(text, encoding="utf-8")
    versions = {"torch": "2.13.0", "system": "Linux host-of-ann"}
    (settings.run.folder / VERSIONS_FILE).write_text(json.dumps(versions), encoding="utf-8")
    (folder / "model").mkdir()
    write_card(folder / "model", settings, step)
    return ModelCard.load(folder / "model" / CARD)


def test_a_card_has_the_figures_of_its_model_and_what_it_was_trained_on(tmp_path: Path) -> None:
    card = _card(tmp_path, **SECRETS)

    assert "| accuracy | 0.000 | 0.500 |" in card.text  # not of batch 75
    assert "| greedy answers | before | after 50 batches |" in card.text
    assert "for 50 of 90 batches" in card.text
    assert "Trained from `base-7b`" in card.text
    assert "path `questions.jsonl`; rewards `rewards.py:exact`, `lab.rewards:brief`" in card.text
    assert "````text\nAnswer.\n```\nThat is all.\n````" in card.text
    assert "| `learner.lr` | `3e-05` |" in card.text
    assert "| `learner.lr_decay` | `cosine` |" in card.text
    assert "| `algorithm.reference_model` | `ref-7b` |" in card.text
    assert "| torch | 2.13.0 |" in card.text
    assert card.data.library_name == "transformers"
    assert card.data.tags is not None
    assert "reinforcement-learning" in card.data.tags
    assert card.data.license is None


def test_a_card_of_a_model_that_was_not_evaluated_since_the_start_says_so(tmp_path: Path) -> None:
    card = _card(tmp_path, step=8, **SECRETS)

    assert "| greedy answers | before |\n" in card.text
    assert "| accuracy | 0.000 |\n" in card.text


def test_a_card_has_no_place_address_or_key(tmp_path: Path) -> None:
    _card(tmp_path, **SECRETS)

    written = (tmp_path / "model" / CARD).read_text(encoding="utf-8")
    for private in ("ann", "secret-place", "sk-123", "10.1.2.3", "bucket", str(tmp_path)):
        assert private not in written, private


def test_a_base_and_data_of_the_hub_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base.md"
    base.write_text("---\nlicense: other\nlicense_name: lab\nlanguage: en\n---\n# Base")
    monkeypatch.setattr("console.report.model_card._card_on_the_hub", lambda name: base)
    data = {"path": "lab/sums-1.5", "prompt": "q", "answer": "a"}

    card = _card(tmp_path, model="lab/base-7b", environment="dataset", environment_settings=data)

    found = card.data.to_dict()
    assert found["base_model"] == "lab/base-7b"
    assert (found["license"], found["license_name"]) == ("other", "lab")
    assert found["datasets"] == ["lab/sums-1.5"]
    assert "language" not in found


def test_a_folder_hands_on_what_its_own_card_declares(tmp_path: Path) -> None:
    run = Settings.model_validate({"run": {"model": str(tmp_path)}}).run
    assert declarations(run) == {}

    (tmp_path / CARD).write_text("---\nlicense: mit\nbase_model: lab/base-7b\ntags: [x]\n---\n")
    assert declarations(run) == {"license": "mit", "base_model": "lab/base-7b"}

    for broken in ("---\n: [\n---\n", "# no front matter", "---\n- a list\n---\n"):
        (tmp_path / CARD).write_text(broken)
        assert declarations(run) == {}


def test_a_hub_that_does_not_answer_costs_the_card_its_license_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    run = Settings.model_validate({"run": {"model": "lab/base-7b"}}).run

    assert declarations(run) == {"base_model": "lab/base-7b"}
