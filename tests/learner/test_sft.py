"""Supervised training through the command: files, resumption, refusals, adapters, two ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buffer.record.demonstrations import Demonstrations
from configs.loader import save
from configs.settings import Settings
from tests.learner.support.lives.supervised_life import live
from tests.learner.support.made_demonstrations import loss_row_by_row, write_demonstrations
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import tiny_settings
from tests.learner.support.trackers.mlflow_stand_in import mlflow_stand_in

ROWS, HELD_OUT, STEPS = 12, 5, 9
"""Three passes over twelve rows, four a step."""


def begin(folder: Path, **learner: object) -> Settings:
    """Write a tiny model, demonstrations and settings."""
    tokenizer = save_tiny_model(folder / "model")
    write_demonstrations(
        folder / "demonstrations", ROWS, held_out=HELD_OUT, vocabulary=len(tokenizer)
    )
    settings = tiny_settings(
        folder,
        run={"model": str(folder / "model"), "eval_every": 4, "steps": STEPS},
        learner={"lr": 1e-2, "lr_decay": "linear", "checkpoint_every": 3, **learner},
        sft={"batch": 4, "held_out": HELD_OUT},
    )
    save(settings, folder / "config.yaml")
    return settings


def lines(settings: Settings, name: str = "metrics") -> list[dict[str, Any]]:
    text = (settings.run.folder / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(settings: Settings) -> list[tuple[int, float]]:
    return [(line["step"], line["sft_loss"]) for line in lines(settings)]


def weights(settings: Settings) -> dict[str, torch.Tensor]:
    return load_file(settings.run.folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    settings = begin(folder)
    live(folder)
    return settings


def test_a_run_leaves_figures_and_a_model_with_the_loss_that_they_state(whole: Settings) -> None:
    folder = whole.run.folder
    summary = json.loads((folder / "summary.json").read_text())
    rows = Demonstrations.read(folder.parent / "demonstrations")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    last = float(loss_row_by_row(model, rows, list(range(ROWS, ROWS + HELD_OUT))).detach())

    assert [step for step, _ in losses(whole)] == list(range(1, STEPS + 1))
    assert [(line["step"], line["metric"]) for line in lines(whole, "eval")] == [
        (step, "log-likelihood") for step in (0, 4, 8, 9)
    ]
    assert lines(whole)[-1]["sft_held_out_loss"] == pytest.approx(last, abs=1e-4)
    assert summary["held_out_log-likelihood_after"] == pytest.approx(-last, abs=1e-4)
    assert summary["steps"] == STEPS
    assert summary["trained_tokens"] == 3 * int(rows.is_trained_T[: rows.bounds[ROWS]].sum())
    assert (folder / "model" / "sft.jsonl").read_text() == (folder / "metrics.jsonl").read_text()
    assert losses(whole)[-1][1] < losses(whole)[0][1]


@pytest.mark.parametrize(
    ("number", "behind"), [(signal.SIGKILL, 2), (signal.SIGKILL, 5), (signal.SIGTERM, 5)]
)
def test_a_run_that_was_ended_goes_on_as_if_nothing_had_happened(
    whole: Settings, tmp_path: Path, number: int, behind: int
) -> None:
    settings = begin(tmp_path, exit_when_told=17)

    live(tmp_path, number=number, behind=behind, code=17 if number == signal.SIGTERM else -number)
    before = len(lines(settings))
    live(tmp_path)

    assert before == behind
    assert losses(settings) == losses(whole)
    assert lines(settings, "eval") == lines(whole, "eval")
    for name, values in weights(whole).items():
        assert torch.equal(weights(settings)[name], values), name
    lives = [line["lineage"] for line in lines(settings)]
    assert (lives[0], lives[-1]) == ((2, 2) if behind == 2 else (1, 2)), "step 3 was saved"


def test_other_demonstrations_are_refused_and_change_nothing(tmp_path: Path) -> None:
    settings = begin(tmp_path)
    live(tmp_path, number=signal.SIGKILL, behind=5, code=-signal.SIGKILL)
    write_demonstrations(tmp_path / "demonstrations", ROWS, held_out=HELD_OUT, seed=1)
    before = losses(settings)

    live(tmp_path, code=2)

    assert losses(settings) == before


def test_adapters_are_merged_into_the_model_and_written_for_peft(
    whole: Settings, tmp_path: Path
) -> None:
    settings = begin(tmp_path, lora_rank=2)

    live(tmp_path)

    assert losses(settings)[0] == pytest.approx(losses(whole)[0]), "adapters begin with nothing"
    assert losses(settings)[-1][1] < losses(settings)[0][1]
    assert (settings.run.folder / "adapter" / "adapter_model.safetensors").exists()
    base = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name, values in weights(settings).items() if not values.equal(base[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}


@pytest.mark.slow
def test_trackers_get_every_step_once(tmp_path: Path) -> None:
    begin(tmp_path)
    with mlflow_stand_in() as server:
        tracked = ("--set", f"trackers.mlflow={{url: '{server.url}'}}")
        live(tmp_path, number=signal.SIGTERM, behind=5, changes=tracked)
        live(tmp_path, changes=tracked)

        assert server.steps("train/sft_loss") == list(range(1, STEPS + 1))
        assert server.steps("train/sft_held_out_loss") == [4, 8, 9]
        assert [run["status"] for run in server.runs.values()] == ["FINISHED"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["", "parallel.sequence=2"])
def test_two_ranks_train_as_one_does(whole: Settings, tmp_path: Path, parallel: str) -> None:
    settings = begin(tmp_path)
    files = ("--config", tmp_path / "config.yaml", "--demonstrations", tmp_path / "demonstrations")
    changes = ("learner.ranks=2", "learner.microbatch_tokens=12", *filter(None, [parallel]))
    flags = [text for change in changes for text in ("--set", change)]

    subprocess.run([sys.executable, "-m", "learner", "sft", *files, *flags], check=True)

    assert [step for step, _ in losses(settings)] == [step for step, _ in losses(whole)]
    for (_, ours), (_, theirs) in zip(losses(settings), losses(whole), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert lines(settings)[-1]["sft_held_out_loss"] == pytest.approx(
        lines(whole)[-1]["sft_held_out_loss"], abs=1e-5
    )
