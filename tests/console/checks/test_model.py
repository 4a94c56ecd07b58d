"""Models that no policy could learn with: their chat templates, and rates that suit another."""

from __future__ import annotations

import json

import pytest

from configs.errors import SettingsError
from configs.settings import RunSettings, Settings
from console.run.checks import model
from console.run.checks.check import CheckWarning
from console.run.checks.model import check_template
from console.run.decoder_sizes import ModelShape
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer

MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[ {{ m.content }} ]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
SMOL = {
    "num_attention_heads": 9,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}
NO_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
NO_STOP = CHATML.replace("<|im_end|>", "[end]")


def template_of(folder, template, *, stop=(), **more):
    path = save_tokenizer(folder, template=template, **more)
    return check_template(RunSettings(model=path, environment="calculator", stop=stop))


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
    with pytest.raises(SettingsError, match=r"got one .*'\[end\]', .*set run\.stop: \['\[end\]'\]"):
        template_of(tmp_path, NO_STOP)

    assert "ends it with '[end]'" in template_of(tmp_path, NO_STOP, stop=("[end]",))


def test_a_template_that_leaves_tools_out_is_a_warning_for_live_agents(tmp_path):
    run = RunSettings(model=save_tokenizer(tmp_path, template=CHATML), environment="agent")

    checked = check_template(run)

    assert isinstance(checked, CheckWarning)
    assert "calls of agents with tools will be refused: run.model must have" in str(checked)


def test_a_model_without_a_template_passes(tmp_path):
    assert template_of(tmp_path, None) == "none: prompts are bare texts"


@pytest.mark.parametrize(
    ("million", "lr_rank", "wrong"),
    [
        (135, (4e-4, 0), "about 1e-05 for all weights of 135 million parameters, got 0.0004"),
        (135, (1e-4, 0), None),
        (135, (1e-6, 0), None),
        (135, (4e-4, 16), None),
        (135, (1e-6, 16), "about 0.0001 for the adapters of 135 million parameters, got 1e-06"),
        (8000, (4e-5, 0), "about 1e-06 for all weights of 8,000 million parameters, got 4e-05"),
        (8000, (1e-9, 0), "nothing may be learned"),
        (1, (4e-4, 0), None),
    ],
)
def test_a_rate_far_from_what_suits_the_size_is_doubted(
    tmp_path, monkeypatch, million, lr_rank, wrong
):
    lr, rank = lr_rank
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    monkeypatch.setattr(ModelShape, "parameters", property(lambda _: int(million * 1e6)))
    settings = Settings.model_validate(
        {
            "run": {"model": str(tmp_path), "environment": "calculator"},
            "learner": {"lr": lr, "lora_rank": rank},
        }
    )

    found = model.check_rate(settings)

    assert isinstance(found, CheckWarning) == (wrong is not None)
    assert wrong is None or wrong in str(found)


def test_the_rate_of_a_model_that_is_made_first_is_not_doubted():
    settings = Settings.model_validate({"run": {"model": "init", "environment": "calculator"}})

    assert model.check_rate(settings) == "of a model that is made first"
