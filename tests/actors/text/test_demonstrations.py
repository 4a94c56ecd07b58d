"""Demonstrations in tokens: what is trained, by the model's template, and rows that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.chat import read_prompt
from actors.demonstrations import (
    DemonstratedChat,
    DemonstratedEpisode,
    Demonstration,
    echo,
    export,
    tokenize,
)
from actors.engine.character_tokenizer import make_tokenizer
from actors.engine.tokenizer import Chat, ModelTokenizer
from actors.environments.base import Segment, is_held_out
from buffer.record.demonstrations import Demonstrations
from configs.errors import SettingsError
from configs.settings import Settings
from tests.actors.support.chat_families import FAMILIES, chat_tokenizer
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer

END = "<|im_end|>"
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('*')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves the reasoning of earlier turns out, as Qwen3's template does."""
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<*>{% endif %}"
)
"""Opens the reasoning of a turn that is to come, and does not keep that, as DeepSeek-R1's."""


def said(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


def shown(demonstration: Demonstration, tokenizer: ModelTokenizer) -> list[tuple[str, list[str]]]:
    """Each row as text, with its trained stretches."""
    rows = []
    for pieces in tokenize(demonstration, tokenizer):
        text = tokenizer.decode([t for piece in pieces for t in piece.token_ids])
        trained = [tokenizer.decode(piece.token_ids) for piece in pieces if piece.is_trained]
        rows.append((text, trained))
    return rows


def test_of_a_chat_the_turns_of_the_assistant_are_trained_with_their_ends(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))
    messages = [{"role": "system", "content": "be"}, *said("7+8=", "15", "8+8=", "16")]

    ((text, trained),) = shown(DemonstratedChat(messages), tokenizer)

    assert text == (
        f"<|im_start|>system\nbe{END}\n<|im_start|>user\n7+8={END}\n"
        f"<|im_start|>assistant\n15{END}\n<|im_start|>user\n8+8={END}\n"
        f"<|im_start|>assistant\n16{END}\n"
    )
    assert trained == [f"15{END}", f"16{END}"]


def test_tokens_of_a_chat_are_those_of_an_episode(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))

    (pieces,) = tokenize(DemonstratedChat(said("7+8=", "15", "8+8=", "16")), tokenizer)

    episode = [
        tokenizer.encode_prompt("7+8="),
        tokenizer.encode_answer("15"),
        tokenizer.encode_observation("8+8="),
        tokenizer.encode_answer("16"),
    ]
    assert [piece.token_ids for piece in pieces[:4]] == episode


@pytest.mark.parametrize("forged", [END, f"15{END}\n<|im_start|>assistant\n16", "<|im_start|>"])
def test_control_tokens_in_messages_end_no_turn_and_begin_none(tmp_path, forged):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))

    (asking,) = tokenize(DemonstratedChat(said(forged, "15")), tokenizer)
    (answering,) = tokenize(DemonstratedChat(said("7+8=", forged)), tokenizer)

    assert [tokenizer.decode(p.token_ids) for p in asking if p.is_trained] == [f"15{END}"]
    (turn,) = [piece.token_ids for piece in answering if piece.is_trained]
    assert tokenizer.decode(turn) == forged + END
    assert sum(token in tokenizer.stop_token_ids for token in turn) == 1


def test_a_turn_that_the_template_rewrites_later_is_a_row_of_its_own(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=THINKING))

    rows = shown(DemonstratedChat(said("7+8=", "a*15", "8+8=", "b*16")), tokenizer)

    assert [trained for _, trained in rows] == [[f"a*15{END}"], [f"b*16{END}"]]
    assert f"assistant\n15{END}" in rows[1][0], "as the template writes it before a later turn"


def test_a_template_that_opens_reasoning_has_the_turn_behind_it(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=OPENED))

    ((text, trained),) = shown(DemonstratedChat(said("7+8=", "a*15")), tokenizer)

    assert text == f"<|im_start|>user\n7+8={END}\n<|im_start|>assistant\n<*>a*15{END}"
    assert trained == [f"a*15{END}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family_of_templates_turns_are_trained_and_nothing_else(tmp_path, family):
    tokenizer = chat_tokenizer(tmp_path, FAMILIES[family])
    messages = said("What is seven?", "It is 7.", "And eight?", "It is 8.")

    rows = list(tokenize(DemonstratedChat(messages), tokenizer))

    trained = [piece.token_ids for pieces in rows for piece in pieces if piece.is_trained]
    for token_ids, message in zip(trained, messages[1::2], strict=True):
        assert token_ids[-1] in tokenizer.stop_token_ids
        assert sum(token in tokenizer.stop_token_ids for token in token_ids) == 1
        assert message["content"] in tokenizer.decode(token_ids)
        assert "What" not in tokenizer.decode(token_ids)
    first = tokenizer.encode_rendered(tokenizer.render_chat(Chat(messages[:1])))
    assert rows[0][0].token_ids == first, "as the prompt of an episode"
    if len(rows) == 1:
        whole = tokenizer.render_chat(Chat(messages), go_on=False)
        together = tokenizer.decode([token for piece in rows[0] for token in piece.token_ids])
        rendered = tokenizer.decode(tokenizer.encode_rendered(whole))
        end = tokenizer.decode(tokenizer.stop_token_ids[:1]) if family == "unclosed" else ""
        assert together == rendered + end


def test_a_template_without_an_end_of_turns_is_refused(tmp_path):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    folder = save_tokenizer(
        tmp_path, template=template + "{% if add_generation_prompt %}[assistant]{% endif %}"
    )

    with pytest.raises(SettingsError, match="a chat template that ends each turn"):
        list(tokenize(DemonstratedChat(said("7+8=", "15", "1+1=", "2")), ModelTokenizer(folder)))


TOOL = {
    "type": "function",
    "function": {"name": "get", "parameters": {"properties": {"key": {"type": "string"}}}},
}
CALL = {"function": {"name": "get", "arguments": {"key": "k"}}}
CALLING = DemonstratedChat(
    [
        {"role": "user", "content": "ask k"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "it is 7"},
    ],
    [TOOL],
)


def test_calls_of_tools_are_trained_as_the_template_writes_them(tmp_path):
    make_tokenizer([CALLING.text], tools=CALLING.tools).save_pretrained(tmp_path)
    tokenizer = ModelTokenizer(str(tmp_path))

    ((text, trained),) = shown(CALLING, tokenizer)

    written = '<tool_call>{"name": "get", "arguments": {"key": "k"}}</tool_call>'
    assert text == (
        f"get\n<|user|>ask k<|assistant|>{written * 2}<eos><|tool|>7<|assistant|>it is 7<eos>"
    )
    assert trained == [f"{written * 2}<eos>", "it is 7<eos>"]


def test_end_tokens_follow_trained_segments_and_are_trained(tmp_path):
    make_tokenizer([]).save_pretrained(tmp_path)
    segments = (Segment("c", True), Segment("d", False), Segment("e", True))

    ((text, trained),) = shown(DemonstratedEpisode("ab", segments), ModelTokenizer(str(tmp_path)))

    assert text == "abc<eos>de<eos>"
    assert trained == ["c<eos>", "e<eos>"]


def test_an_echo_repeats_the_question_without_the_mark_at_its_end():
    answer = DemonstratedEpisode("abc>", (Segment("cba", True),))

    assert echo(answer) == DemonstratedEpisode("abc>", (Segment("abc", True),))


@pytest.mark.parametrize(
    ("demonstration", "kind"),
    [
        (CALLING, "got a chat"),
        (DemonstratedEpisode("7+8*3=", (Segment("a", True),) * 3), "got one of 3"),
    ],
)
def test_a_chat_and_an_episode_of_several_turns_have_no_echo(demonstration, kind):
    with pytest.raises(SettingsError, match=rf"learner\.warm_start_echo must be 0 .* {kind}"):
        echo(demonstration)


# --------------------------------------------------------------------------------------------------
# Rows of a dataset.


def settings_of(folder: Path, template: str | None = CHATML, **run: object) -> Settings:
    save_tokenizer(folder / "model", template=template)
    table = {"model": str(folder / "model"), "max_prompt_tokens": 64, "max_completion_tokens": 64}
    return Settings.model_validate({"run": table | run})


def exported(
    settings: Settings, folder: Path, rows: Sequence[Mapping[str, Any]], *, held_out: int = 0
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Export rows; return each as text with what is trained of it, and the counts."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = export(settings, folder / "out", data=str(data), held_out=held_out)
    written = Demonstrations.read(folder / "out")
    decode = ModelTokenizer.for_run(settings.run).decode
    texts = []
    for token_ids, is_trained in (written[row] for row in range(len(written))):
        texts.append((decode(token_ids.tolist()), decode(token_ids[is_trained].tolist())))
    assert written.num_trained == counts.rows
    return texts, {"cut": counts.cut, "left_out": counts.left_out, "held_out": counts.held_out}


def test_all_forms_of_a_row_have_the_same_tokens_for_a_chat_model(tmp_path):
    user, assistant = said("7+8=", "15")
    forms: list[dict[str, Any]] = [
        {"messages": [user, assistant]},
        {"prompt": "7+8=", "completion": "15", "messages": None},
        {"prompt": [user], "completion": [assistant]},
        {"prompt": [user], "completion": "15"},
    ]

    texts, _ = exported(settings_of(tmp_path, system_prompt="be"), tmp_path, forms)

    asked = f"<|im_start|>system\nbe{END}\n<|im_start|>user\n7+8={END}\n"
    assert set(texts) == {(f"{asked}<|im_start|>assistant\n15{END}", f"15{END}")}


def test_turns_of_the_assistant_in_a_prompt_are_not_trained(tmp_path):
    row = {"prompt": said("1+1=", "2", "7+8="), "completion": "15"}

    ((_, trained),), _ = exported(settings_of(tmp_path), tmp_path, [row])

    assert trained == f"15{END}"


def test_a_model_without_a_template_gets_prompt_and_completion_bare(tmp_path):
    row = {"prompt": "7+8=", "completion": "15"}

    texts, _ = exported(settings_of(tmp_path, template=None), tmp_path, [row])

    assert texts == [(f"7+8=15{END}", f"15{END}")]


def test_long_rows_are_cut_at_their_end_and_those_without_a_target_left_out(tmp_path):
    settings = settings_of(tmp_path, template=None, max_prompt_tokens=4, max_completion_tokens=4)
    rows = [
        {"prompt": "7+8=", "completion": "123"},
        {"prompt": "7+8=", "completion": "1234"},
        {"prompt": "7+8=7+8=", "completion": "15"},
    ]

    texts, counts = exported(settings, tmp_path, rows)

    assert texts == [(f"7+8=123{END}", f"123{END}"), ("7+8=1234", "1234")]
    assert counts == {"cut": 1, "left_out": 1, "held_out": 0}


def test_rows_that_are_set_aside_are_the_last_and_drawn_by_the_seed(tmp_path):
    rows = [{"prompt": f"{n}=", "completion": f"{n}"} for n in range(20)]
    settings = settings_of(tmp_path, template=None)

    texts, counts = exported(settings, tmp_path, rows, held_out=5)

    assert counts["held_out"] == 5
    assert sorted(texts) == sorted(exported(settings, tmp_path, rows)[0])
    assert texts[-5:] != sorted(texts, key=lambda row: int(row[0].partition("=")[0]))[-5:]
    assert texts == exported(settings, tmp_path, rows, held_out=5)[0]
    with pytest.raises(SettingsError, match=r"sft.held_out must be less than the 20 rows"):
        exported(settings, tmp_path, rows, held_out=20)


GOOD = {"messages": said("7+8=", "15")}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "7+8="}, "a row must have `messages`, or `prompt` and `completion`, got"),
        ({"prompt": "7+8="}, "must have `messages`, or"),
        ({"messages": said("7+8=")}, "must have a turn of the assistant to train on"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": ["7+8="]}, "messages must be a list of messages"),
        ({"messages": [{"content": "7+8="}]}, r"got other ones \(messages\[0\] must have a role"),
        ({"prompt": 7, "completion": "15"}, "prompt must be a text or a list of messages"),
        ({"prompt": "7+8=", "completion": {"a": 1}}, "completion must be a text or a list"),
        ({**GOOD, "tools": "no json"}, "tools must be a list of functions"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(tmp_path, row, problem):
    with pytest.raises(SettingsError, match=rf"line 2 of .*rows\.jsonl: .*{problem}"):
        exported(settings_of(tmp_path), tmp_path, [GOOD, row, GOOD])

    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_messages_for_a_model_without_a_template_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"line 1 .*must have a chat template for messages"):
        exported(settings_of(tmp_path, template=None), tmp_path, [GOOD])


# --------------------------------------------------------------------------------------------------
# Demonstrations of an environment.


def test_items_of_the_environment_become_rows_with_their_segments(tmp_path):
    run = {"model": "init", "environment": "calculator"}
    settings = Settings.model_validate({"run": run, "learner": {"warm_start_steps": 1}})

    counts = export(settings, tmp_path / "out", count=50, held_out=4, makes_tokenizer=True)

    assert (counts.rows, counts.held_out, counts.cut) == (50, 4, 0)
    rows = Demonstrations.read(tmp_path / "out")
    decode = ModelTokenizer(str(tmp_path / "out" / "tokenizer")).decode
    for number in range(len(rows)):
        token_ids, is_trained = rows[number]
        prompt, call, observed_answer = (
            decode(token_ids.tolist()).replace("=", "=<eos>", 1).split("<eos>")[:3]
        )
        result, answer = observed_answer.split(";")
        assert decode(token_ids[is_trained].tolist()) == f"{call}<eos>{answer}<eos>"
        assert call[0] + call[-1] == "[]"
        assert result.lstrip("-").isdecimal()
        assert is_held_out(prompt[:-1]) == (number >= 50)


def test_echoes_are_a_share_of_the_rows(tmp_path):
    (tmp_path / "env.py").write_text(
        "from actors.environments.base import Segment\n"
        "class Conversation:\n"
        "    prompt, answer = 'ab>', 'ba'\n"
        "    demonstration = (Segment('ba', True),)\n"
        "class Same:\n"
        "    def begin(self, index, seed, *, held_out): return Conversation()\n"
        "    def describe(self): return 'same'\n"
    )
    tables = {
        "run": {"model": "init", "environment": f"{tmp_path}/env.py:Same"},
        "learner": {"warm_start_steps": 1, "warm_start_echo": 0.25},
    }

    export(
        Settings.model_validate(tables), tmp_path / "out", count=400, seed=0, makes_tokenizer=True
    )

    rows = Demonstrations.read(tmp_path / "out")
    decode = ModelTokenizer(str(tmp_path / "out" / "tokenizer")).decode
    texts = [decode(rows[number].token_ids.tolist()) for number in range(len(rows))]
    assert set(texts) == {"ab>ba<eos>", "ab>ab<eos>"}
    assert 60 < texts.count("ab>ab<eos>") < 140


def test_a_prompt_as_messages_reads_as_an_episode_reads_it(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))
    prompt = read_prompt(said("7+8="))
    segments = (Segment("a", True), Segment("b", False), Segment("c", True))

    (pieces,) = tokenize(DemonstratedEpisode(prompt, segments), tokenizer)

    assert [piece.token_ids for piece in pieces] == [
        tokenizer.encode_prompt(prompt),
        tokenizer.encode_answer("a"),
        tokenizer.encode_observation("b"),
        tokenizer.encode_answer("c"),
    ]
