"""`nyala try`: which model of a run answers, and that it answers as the run would sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from configs.loader import save
from configs.settings import LearnerSettings, Settings
from console.main import app
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.export import export_model
from learner.checkpointing.learner_state import LearnerState
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from learner.reporting.metrics import Totals
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.tiny_policy import constant_rate, save_tiny_model

STATE = LearnerState("r", "h", 1, lineage=4, cursor=0, trained=(), totals=Totals())
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_run(folder: Path, **run: object) -> Settings:
    """Begin a run whose model has a chat template."""
    tokenizer = save_tiny_model(folder / "0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "0")
    tables = {"name": "r", "directory": folder, "model": str(folder / "0"), "steps": 9}
    tables |= {"environment": "calculator", "max_completion_tokens": 6, **run}
    settings = Settings.model_validate({"run": tables})
    settings.run.folder.mkdir()
    save(settings, settings.run.folder / "config.yaml")
    return settings


def checkpoint(settings: Settings, step: int, ranks: Ranks) -> None:
    """Write a checkpoint after batch `step`, whose model is one of that seed."""
    model = settings.run.directory / str(step)
    save_tiny_model(model, seed=step)
    policy = Policy(load_causal_lm(model), temperature=1.0)
    policy = shard(policy, ranks.mesh, dtype=torch.float32)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    checkpoints = Checkpoints(settings.run.folder / "checkpoints", keep=9, ranks=ranks)
    checkpoints.save(replace(STATE, step=step), policy, optimizer)


def ask(settings: Settings, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
    command = ["try", str(settings.run.folder), *arguments]
    answer = CliRunner().invoke(app, command, input=stdin)
    assert answer.exit_code == code, answer.output
    return answer.output if code else answer.stdout


@torch.no_grad()
def greedy(settings: Settings, step: int, prompt: str, *, tokens: int = 6) -> str:
    """What transformers' own model of that seed answers."""
    model = AutoModelForCausalLM.from_pretrained(settings.run.directory / str(step))
    tokenizer = AutoTokenizer.from_pretrained(settings.run.directory / "0")
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    for _ in range(tokens):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(token_ids[-tokens:], skip_special_tokens=False))


def test_the_newest_model_answers_in_the_runs_template(tmp_path: Path, ranks: Ranks) -> None:
    settings = make_run(tmp_path, system_prompt="be brief")
    prompt = "system:be brief\nuser:hi\nassistant:"

    began = json.loads(ask(settings, "hi", "--json"))
    assert "must hold best, got none" in ask(settings, "hi", "--checkpoint", "best", code=2)
    for step in (2, 4):
        checkpoint(settings, step, ranks)
    newest = json.loads(ask(settings, "-", "--json", stdin="hi"))
    earlier = json.loads(ask(settings, "hi", "--json", "--checkpoint", "2"))

    answers = [began, newest, earlier]
    assert [each["model"] for each in answers] == [
        "the model that the run began with",
        "step-000004",
        "step-000002",
    ]
    assert [each["text"] for each in answers] == [
        greedy(settings, step, prompt) for step in (0, 4, 2)
    ]
    assert len({each["text"] for each in answers}) == 3
    assert {(each["finish"], each["tokens"]) for each in answers} == {("length", 6)}
    left = {path.name for path in settings.run.folder.iterdir()}
    assert left == {"config.yaml", "checkpoints", "checkpoint.key"}
    assert "must hold step-000009, got step-000002" in ask(
        settings, "hi", "--checkpoint", "9", code=2
    )


def test_the_model_of_a_finished_run_answers_and_the_runs_strings_end_it(
    tmp_path: Path, ranks: Ranks
) -> None:
    settings = make_run(tmp_path, stop=[";"])
    checkpoint(settings, 4, ranks)
    checkpoints = settings.run.folder / "checkpoints" / "step-000004"
    export_model(checkpoints, settings.run, settings.run.folder / "model")
    (settings.run.folder / "summary.json").write_text("{}")
    whole = greedy(settings, 4, "user:hi\nassistant:")
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"stop": (whole[2],)})}
    )
    save(settings, settings.run.folder / "config.yaml")

    shown = ask(settings, "hi")

    assert shown.startswith("the model after batch 9 of r, greedy\n")
    assert ", stop " in shown
    assert shown.splitlines()[2].strip() == whole[: whole.index(whole[2])].strip()


def test_several_answers_are_sampled(tmp_path: Path) -> None:
    settings = make_run(tmp_path)

    lines = ask(settings, "hi", "-n", "5", "--max-tokens", "9", "--json").splitlines()

    answers = [json.loads(line) for line in lines]
    assert len({each["text"] for each in answers}) > 1
    assert max(each["tokens"] for each in answers) <= 9


def test_what_a_terminal_would_obey_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from console.samples import answers

    async def hostile(*_: object, **__: object) -> list[answers.PromptCompletion]:
        return [answers.PromptCompletion("a\x1b[2Jb", "stop", 3)]

    monkeypatch.setattr(answers, "answer", hostile)

    assert "a\\x1b[2Jb" in ask(make_run(tmp_path), "hi")
