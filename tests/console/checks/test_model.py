"""Chat templates that no policy could learn under, and those that only look like it."""

from __future__ import annotations

import pytest

from configs.errors import SettingsError
from configs.settings import RunSettings
from console.run.checks.model import check_template
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer

MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[ {{ m.content }} ]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
NO_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
NO_STOP = CHATML.replace("<|im_end|>", "[end]")


def template_of(folder, template, *, stop=(), **more):
    model = save_tokenizer(folder, template=template, **more)
    return check_template(RunSettings(model=model, environment="calculator", stop=stop))


def test_a_template_that_opens_and_ends_the_turn_passes(tmp_path):
    assert template_of(tmp_path, CHATML) == (
        "opens the turn with '<|im_start|>assistant\\n', ends it with '<|im_end|>'"
    )


def test_a_template_without_a_generation_prompt_fails(tmp_path):
    with pytest.raises(SettingsError, match=r"adds a generation prompt.*'<\|im_start\|>assistant'"):
        template_of(tmp_path, NO_PROMPT)


def test_a_template_whose_answers_follow_the_prompt_needs_no_generation_prompt(tmp_path):
    assert "answers follow prompts" in template_of(tmp_path, MISTRAL, end="</s>")


def test_a_template_that_ends_turns_with_no_stop_token_fails_unless_it_is_a_stop_string(tmp_path):
    with pytest.raises(SettingsError, match=r"got '\[end\]' .*set run\.stop: \['\[end\]'\]"):
        template_of(tmp_path, NO_STOP)

    assert "ends it with '[end]'" in template_of(tmp_path, NO_STOP, stop=("[end]",))


def test_a_model_without_a_template_passes(tmp_path):
    assert template_of(tmp_path, None) == "none: prompts are bare texts"
