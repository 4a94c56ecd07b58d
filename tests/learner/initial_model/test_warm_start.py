"""The supervised start of a small model: both commands, from demonstrations to answers."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.__main__ import main as actors_main
from actors.engine.character_tokenizer import make_tokenizer
from actors.engine.tokenizer import Chat, ModelTokenizer
from actors.tool_calls import read_calls
from configs.loader import save
from learner.__main__ import main
from tests.learner.support.tiny_run import tiny_settings

TOOL = {
    "type": "function",
    "function": {"name": "get", "parameters": {"properties": {"key": {"type": "string"}}}},
}
CALL = {"function": {"name": "get", "arguments": {"key": "k"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "ask k"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "7"},
]
ENVIRONMENT = """
from actors.environments.base import Segment

class Conversation:
    def __init__(self, prompt, said):
        self.prompt, self.answer = prompt, None
        self.demonstration = tuple(Segment(*segment) for segment in said)

class Said:
    def __init__(self, **said):
        self._said = list(said.items())

    def begin(self, index, seed, *, held_out):
        return Conversation(*self._said[index % len(self._said)])

    def describe(self):
        return "said"
"""


def test_actors_read_the_calls_of_a_model_that_was_made_for_agents(tmp_path: Path) -> None:
    make_tokenizer([json.dumps(MESSAGES)], tools=[TOOL]).save_pretrained(tmp_path)
    tokenizer = ModelTokenizer(str(tmp_path))

    asked = tokenizer.render_chat(Chat(MESSAGES[:1], [TOOL]))
    turn = tokenizer.render_chat(Chat(MESSAGES[:2], [TOOL])).removeprefix(asked)
    whole = tokenizer.render_chat(Chat(MESSAGES, [TOOL]))

    assert [call.arguments for call in read_calls(turn)] == [{"key": "k"}] * 2
    assert tokenizer.decode(tokenizer.encode_rendered(whole)).endswith("<|tool|>7<|assistant|>")


def make_model(folder: Path, said: Mapping[str, list[tuple[str, bool]]], **learner: object) -> Path:
    """Make a small model of what an environment shows, by the commands that the console runs."""
    (folder / "env.py").write_text(ENVIRONMENT)
    settings = tiny_settings(
        folder,
        run={"environment": f"{folder}/env.py:Said", "environment_settings": said},
        learner={"init_layers": 1, "init_width": 64, "warm_start_lr": 1e-2, **learner},
    )
    save(settings, folder / "config.yaml")
    config, shown = ["--config", str(folder / "config.yaml")], str(folder / "shown")
    assert actors_main(["export", *config, "--out", shown, "--count", "64", "--init"]) == 0
    arguments = [*config, "--demonstrations", shown, "--out", str(folder / "m")]
    assert main(["warm-start", *arguments]) == 0
    return folder / "m"


def test_the_commands_train_and_leave_a_model_that_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {f"{x}>": [(x * 2, True), ("?", False), ("ok", True)] for x in "abcd"}

    folder = make_model(tmp_path, said, warm_start_steps=60, warm_start_batch=16)

    assert gc.isenabled(), "it is off while torch is imported"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["step"] == lines[-1]["steps"] == 60
    assert lines[-1]["sft_loss"] < 0.05
    kept = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept] == list(range(1, 61))
    assert kept[-1]["sft_loss"] == lines[-1]["sft_loss"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer.encode("c>", add_special_tokens=False)])
    answer = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    assert tokenizer.decode(answer[0, 2:]) == "cc<eos>"


def test_a_model_without_a_supervised_start_needs_no_right_answers(tmp_path: Path) -> None:
    folder = make_model(tmp_path, {"é>": []}, warm_start_steps=0)

    assert AutoTokenizer.from_pretrained(folder).encode("é")[0] > 2, "it has the character"
    assert (folder / "sft.jsonl").read_text() == ""


@pytest.mark.slow
def test_a_start_with_echoes_knows_both_answers(tmp_path: Path) -> None:
    folder = make_model(
        tmp_path,
        {"ab>": [("ba", True)]},
        warm_start_steps=40,
        warm_start_batch=64,
        warm_start_echo=0.5,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        last_V = model(torch.tensor([tokenizer.encode("ab>")])).logits[0, -1].softmax(-1)
    forwards, backwards = last_V[tokenizer.encode("a")[0]], last_V[tokenizer.encode("b")[0]]
    assert 0.25 < forwards < 0.75
    assert 0.25 < backwards < 0.75
