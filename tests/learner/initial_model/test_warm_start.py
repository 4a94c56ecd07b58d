"""The supervised start, through the command."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine.tokenizer import Chat, ModelTokenizer
from actors.tool_calls import read_calls
from configs.errors import SettingsError
from configs.loader import save
from learner.__main__ import main
from learner.initial_model import ChatPair, Pair, echo, make_tokenizer, read_pairs, tokenize
from tests.learner.support.tiny_run import tiny_settings


def _write_pairs(path: Path) -> None:
    lines = [
        {"prompt": f"{letter}>", "segments": [[letter * 2, True], ["?", False], ["ok", True]]}
        for letter in "abcd"
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


TOOL = {
    "type": "function",
    "function": {"name": "get", "parameters": {"properties": {"key": {"type": "string"}}}},
}
CALL = {"function": {"name": "get", "arguments": {"key": "k"}}}
CHAT = ChatPair(
    [
        {"role": "user", "content": "ask k"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "it is 7"},
    ],
    [TOOL],
)


def test_of_a_chat_what_the_assistant_says_is_trained_with_the_ends_of_its_turns() -> None:
    tokenizer = make_tokenizer([CHAT.text], tools=CHAT.tools)

    pair = tokenize(CHAT, tokenizer)

    written = '<tool_call>{"name": "get", "arguments": {"key": "k"}}</tool_call>'
    assert tokenizer.decode(pair.token_ids) == (
        f"get\n<|user|>ask k<|assistant|>{written * 2}<eos><|tool|>7<|assistant|>it is 7<eos>"
    )
    trained = [t for t, is_trained in zip(pair.token_ids, pair.trained, strict=True) if is_trained]
    assert tokenizer.decode(trained) == f"{written * 2}<eos>it is 7<eos>"
    assert len(tokenizer.encode(written, add_special_tokens=False)) == 8


def test_actors_read_the_calls_of_a_model_that_was_made_for_agents(tmp_path: Path) -> None:
    make_tokenizer([CHAT.text], tools=CHAT.tools).save_pretrained(tmp_path)
    tokenizer = ModelTokenizer(str(tmp_path))

    asked = tokenizer.render_chat(Chat(CHAT.messages[:1], [TOOL]))
    turn = tokenizer.render_chat(Chat(CHAT.messages[:2], [TOOL])).removeprefix(asked)
    whole = tokenizer.render_chat(Chat(CHAT.messages[:3], [TOOL]))

    assert [call.arguments for call in read_calls(turn)] == [{"key": "k"}] * 2
    assert tokenizer.decode(tokenizer.encode_rendered(whole)).endswith("<|tool|>7<|assistant|>")


def test_a_chat_cannot_be_echoed() -> None:
    with pytest.raises(SettingsError, match=r"warm_start_echo must be 0 .*, got a chat"):
        echo(CHAT)


def test_the_command_trains_and_leaves_a_model_that_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_pairs(tmp_path / "pairs.jsonl")
    settings = tiny_settings(
        tmp_path,
        learner={
            "init_layers": 1,
            "init_width": 64,
            "warm_start_steps": 60,
            "warm_start_batch": 16,
            "warm_start_lr": 1e-2,
        },
    )
    save(settings, tmp_path / "config.yaml")
    command = ["warm-start", "--config", str(tmp_path / "config.yaml")]

    code = main([*command, "--pairs", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "m")])

    assert code == 0
    assert gc.isenabled(), "it is off while torch is imported"
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert reports[-1]["step"] == reports[-1]["steps"] == 60
    assert reports[-1]["loss"] < 0.05
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    prompt = torch.tensor([tokenizer.encode("c>", add_special_tokens=False)])
    answer = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    assert tokenizer.decode(answer[0, 2:]) == "cc<eos>"


def test_end_tokens_follow_trained_segments_and_are_trained() -> None:
    tokenizer = make_tokenizer([])
    pair = Pair("ab", (("c", True), ("d", False), ("e", True)))

    tokens = tokenize(pair, tokenizer)

    assert tokenizer.decode(tokens.token_ids) == "abc<eos>de<eos>"
    assert tokens.trained == (False, False, True, True, False, True, True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "at least one pair"),
        ('{"prompt": "a"}\n', "line 1 of"),
        ('{"prompt": "a", "segments": [["b", true]]}\nnonsense\n', "line 2 of"),
        ('{"prompt": "a", "segments": [["b"]]}\n', "line 1 of"),
    ],
)
def test_wrong_pairs_are_refused_by_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(text)

    with pytest.raises(SettingsError, match=problem):
        read_pairs(file)


def test_a_missing_file_of_pairs_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--pairs must be a readable file"):
        read_pairs(tmp_path / "nowhere")


def test_pairs_in_another_encoding_are_a_settings_error(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_bytes('{"prompt": "é", "segments": [["b", true]]}'.encode("latin-1"))

    with pytest.raises(SettingsError, match=r"readable file in UTF-8, got .*pairs\.jsonl"):
        read_pairs(file)


def test_an_echo_repeats_the_question_without_the_mark_at_its_end() -> None:
    assert echo(Pair("abc>", (("cba", True),))) == Pair("abc>", (("abc", True),))


def test_episodes_of_several_turns_have_no_echo() -> None:
    dialogue = Pair("7+8*3=", (("[8*3]", True), ("24;", False), ("31", True)))

    with pytest.raises(SettingsError, match=r"learner\.warm_start_echo must be 0"):
        echo(dialogue)


@pytest.mark.slow
def test_a_start_with_echoes_knows_both_answers(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "ab>", "segments": [["ba", true]]}\n')
    settings = tiny_settings(
        tmp_path,
        learner={
            "init_layers": 1,
            "init_width": 64,
            "warm_start_steps": 40,
            "warm_start_batch": 64,
            "warm_start_lr": 1e-2,
            "warm_start_echo": 0.5,
        },
    )
    save(settings, tmp_path / "config.yaml")

    arguments = ["--config", str(tmp_path / "config.yaml"), "--pairs", str(pairs)]
    assert main(["warm-start", *arguments, "--out", str(tmp_path / "model")]) == 0

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        last_V = model(torch.tensor([tokenizer.encode("ab>")])).logits[0, -1].softmax(-1)
    forwards, backwards = last_V[tokenizer.encode("a")[0]], last_V[tokenizer.encode("b")[0]]
    assert 0.25 < forwards < 0.75
    assert 0.25 < backwards < 0.75
