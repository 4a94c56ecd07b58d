"""The tokenizer of a teacher against that of the policy, and messages that only a teacher reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from configs.errors import SettingsError
from configs.settings import RunSettings, Settings
from learner.data.batch import TeacherPrompt, prompt_of_episode
from learner.data.teachers import check_tokenizer, teacher_prompt_of
from tests.actors.support.saved_tokenizer import CHATML, LETTERS, SPECIAL, save_tokenizer
from tests.learner.support.made_episodes import make_episode

WITHOUT_SYSTEM = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
)
REFUSES_SYSTEM = "{{ raise_exception('no system') }}"


def run_of(folder: Path, **more: Any) -> RunSettings:
    return RunSettings(
        model=save_tokenizer(folder / "ours", **({"template": CHATML} | more)),
        environment="calculator",
    )


def prompt_for(run: RunSettings, text: str) -> TeacherPrompt:
    settings = {"run": run.model_dump(mode="json"), "algorithm": {"teacher_prompt": text}}
    return teacher_prompt_of(Settings.model_validate(settings))


def test_equal_tokenizers_pass_whatever_their_templates(tmp_path: Path) -> None:
    theirs = save_tokenizer(tmp_path / "theirs", template=None)

    assert check_tokenizer(run_of(tmp_path), theirs) == "59 tokens, as run.model has them"


def test_another_end_of_a_text_is_said(tmp_path: Path) -> None:
    theirs = save_tokenizer(tmp_path / "theirs", end="</s>")

    assert "its texts end with '</s>', those of run.model with '<|im_end|>'" in check_tokenizer(
        run_of(tmp_path), theirs
    )


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"letters": LETTERS.replace("bc", "cb")}, "whose token 1 is 'c', not 'b'; choose"),
        ({"special": [*SPECIAL, "<think>"]}, "whose token 59 is '<think>', not missing"),
        ({"special": SPECIAL[:3]}, "whose token 58 is missing, not '</s>'"),
    ],
)
def test_the_first_token_that_differs_is_named(
    tmp_path: Path, theirs: dict[str, Any], text: str
) -> None:
    folder = save_tokenizer(tmp_path / "theirs", **theirs)

    with pytest.raises(SettingsError, match=text):
        check_tokenizer(run_of(tmp_path), folder)


def test_a_token_that_is_special_to_one_alone_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    tokenizer = AutoTokenizer.from_pretrained(run_of(tmp_path).model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["a", *SPECIAL]})
    tokenizer.save_pretrained(str(folder))

    with pytest.raises(SettingsError, match="whose token 0, 'a', is special, not plain; choose"):
        check_tokenizer(run_of(tmp_path), str(folder))


def test_a_teacher_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.teacher must have a tokenizer, got"):
        check_tokenizer(run_of(tmp_path), str(tmp_path))


@pytest.mark.parametrize("begin", [None, "<|im_start|>"])
def test_a_text_becomes_a_system_message_before_the_prompt(
    tmp_path: Path, begin: str | None
) -> None:
    """Also where the token that begins texts begins every message, as that of SmolLM2 does."""
    run = run_of(tmp_path, begin=begin)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat[1:], tokenize=False, add_generation_prompt=True)
    episode = make_episode(prompt=tokenizer.encode(prompt, add_special_tokens=False))

    read = prompt_for(run, "be kind")(episode)

    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(read) == whole
    assert read.dtype == np.int32


def test_without_a_chat_template_the_bare_text_comes_first(tmp_path: Path) -> None:
    run = run_of(tmp_path, template=None)
    tokenizer = AutoTokenizer.from_pretrained(run.model)

    read = prompt_for(run, "abc")(make_episode(prompt=tokenizer.encode("de")))

    assert tokenizer.decode(read) == "abcde"


def test_the_token_that_begins_a_text_stays_the_first(tmp_path: Path) -> None:
    run = run_of(tmp_path, template="<s>" + CHATML, begin="<s>", end="</s>")
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    prompt = tokenizer.encode("<s>de", add_special_tokens=False)

    read = tokenizer.decode(prompt_for(run, "abc")(make_episode(prompt=prompt)))

    assert read == "<s><|im_start|>system\nabc<|im_end|>\nde"


def test_a_function_sees_the_episode_and_may_say_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, template=None)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    code = tmp_path / "hints.py"
    code.write_text(
        "def hint(prompt, completion, answer):\n"
        "    return '' if prompt == 'a' else f'{prompt}{completion}{answer};'\n"
    )
    episode = make_episode(prompt=tokenizer.encode("d"), completion=tokenizer.encode("e"))
    episode.metadata["answer"] = "f"
    prompt_of = prompt_for(run, f"{code}:hint")

    assert tokenizer.decode(prompt_of(episode)) == "def;d"
    silent = make_episode(prompt=tokenizer.encode("a"))
    assert prompt_of(silent).tolist() == silent.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("1 / 0", r"must return a text for each episode, got ZeroDivisionError.*hints\.py:2"),
        ("None", r"must return a text for each episode, got NoneType; mend"),
    ],
)
def test_a_function_that_fails_is_named(tmp_path: Path, body: str, text: str) -> None:
    code = tmp_path / "hints.py"
    code.write_text(f"def hint(**episode):\n    return {body}\n")
    prompt_of = prompt_for(run_of(tmp_path), f"{code}:hint")

    with pytest.raises(SettingsError, match=text):
        prompt_of(make_episode())


@pytest.mark.parametrize(
    ("template", "text"),
    [(WITHOUT_SYSTEM, "leaves a system message out"), (REFUSES_SYSTEM, "got an error .no system.")],
)
def test_a_template_without_system_messages_is_refused_at_the_start(
    tmp_path: Path, template: str, text: str
) -> None:
    run = run_of(tmp_path, template=template)

    with pytest.raises(SettingsError, match=text):
        prompt_for(run, "be kind")


def test_without_a_setting_a_teacher_reads_the_prompt(tmp_path: Path) -> None:
    settings = Settings(run=run_of(tmp_path))

    assert teacher_prompt_of(settings) is prompt_of_episode
