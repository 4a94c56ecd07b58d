"""`nyala checkpoint` on a folder of a run: what it lists, finds, writes and removes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from configs.loader import save
from configs.settings import LearnerSettings, Settings
from console.main import app
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from learner.reporting.metrics import Totals
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.tiny_policy import constant_rate, save_tiny_model

STATE = LearnerState("r", "h", 1, lineage=4, cursor=0, trained=(), totals=Totals())


def _nyala(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def run(tmp_path: Path, ranks: Ranks) -> Path:
    """A run with three checkpoints of its model, which was trained after it was made."""
    save_tiny_model(tmp_path / "model")
    tables = {"name": "r", "directory": tmp_path, "model": str(tmp_path / "model")}
    settings = Settings.model_validate({"run": {**tables, "environment": "calculator"}})
    settings.run.folder.mkdir()
    save(settings, settings.run.folder / "config.yaml")
    policy = Policy(load_causal_lm(tmp_path / "model"), temperature=1.0)
    policy = shard(policy, ranks.mesh, dtype=torch.float32)
    with torch.no_grad():
        policy.causal_lm.lm_head.weight.add_(1.0)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    checkpoints = Checkpoints(settings.run.folder / "checkpoints", keep=9, ranks=ranks)
    for step in (2, 4, 6):
        checkpoints.save(replace(STATE, step=step), policy, optimizer)
    return settings.run.folder


def test_checkpoints_are_listed_verified_and_pruned(run: Path) -> None:
    (run / "eval.jsonl").write_text('{"step": 4, "accuracy": 0.5}\n{"step": 6, "accuracy": 0.25}')
    code, output = _nyala("list", run, "--json")
    rows = json.loads(output)
    assert [row["checkpoint"] for row in rows] == ["step-000002", "step-000004", "step-000006"]
    assert {(row["lineage"], row["by"]) for row in rows} == {(4, "this run")}

    assert [(row["held out"], row["is"]) for row in rows] == [("", ""), (0.5, "best"), (0.25, "")]

    code, output = _nyala("verify", run, "best", "--json")
    assert [row["checkpoint"] for row in json.loads(output)] == ["step-000004"]
    assert _nyala("verify", run)[0] == 0
    state = run / "checkpoints" / "step-000004" / "state.json"
    state.write_bytes(state.read_bytes() + b" ")
    code, output = _nyala("verify", run, "--json")
    findings = [row["finding"] for row in json.loads(output)]
    assert code == 1
    assert [finding == "intact" for finding in findings] == [True, False, True]
    assert "must have the digest" in findings[1]

    code, _ = _nyala("prune", run, "--keep", 2)
    assert code == 2, "one that is to stay is damaged"
    assert len(list((run / "checkpoints").iterdir())) == 3
    assert _nyala("prune", run, "--keep", 1)[0] == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000006"]


def test_an_exported_checkpoint_is_the_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.checkpointing.export.FILE_BYTES", 20_000)

    code, output = _nyala("export", run, "--to", tmp_path / "out")

    assert code == 0, output
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, ours), theirs in zip(exported.named_parameters(), initial.parameters(), strict=True):
        expected = theirs + 1 if name == "model.embed_tokens.weight" else theirs
        assert torch.allclose(ours, expected, rtol=0.01, atol=0.01), name
    assert (tmp_path / "out" / "tokenizer.json").exists()

    code, output = _nyala("export", run, "--adapter", "--to", tmp_path / "adapter")
    assert code != 0 and not (tmp_path / "adapter").exists()

    code, output = _nyala("export", run, "step-000009", "--to", tmp_path / "more")
    assert code == 2
    assert "must hold step-000009, got step-000002" in output
