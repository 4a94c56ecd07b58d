"""Tools in chat templates: what the policy is told, and which templates are refused."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from actors.chat import ChatMessage
from actors.engine.character_tokenizer import EOS, make_tokenizer
from actors.engine.tokenizer import ModelTokenizer
from configs.errors import SettingsError

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LISTED = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}" + EOS + "{% endif %}"
CALLED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HERMES = '<tool_call>{"name": "{{c.function.name}}", "arguments": {{c.function.arguments|tojson}}}'
BARE = '{"name": "{{c.function.name}}", "parameters": {{c.function.arguments|tojson}}}'
PYTHON = "[{{c.function.name}}(argument='a value', number=3)]"

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])


def tokenizer_of(folder: Path, template: str | None) -> ModelTokenizer:
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ModelTokenizer(str(folder))


@pytest.mark.parametrize("written", [HERMES + "</tool_call>", BARE])
def test_tools_stand_in_the_prompt_and_their_results_in_the_next_turn(tmp_path, written):
    tokenizer = tokenizer_of(tmp_path, LISTED + CALLED.replace("CALL", written))

    prompt = tokenizer.decode(tokenizer.encode_prompt("1+2", TOOLS))
    results = (ChatMessage("tool", "3"), ChatMessage("tool", ""))
    observation = tokenizer.decode(tokenizer.encode_observation(results))

    assert prompt == TOOLS[1:-1] + EOS + "[user]1+2" + EOS + "[assistant]"
    assert observation == f"[tool]3{EOS}[tool]{EOS}[assistant]"
    assert tokenizer.decode(tokenizer.encode_observation((ChatMessage("tool", ""),))) == (
        f"[tool]{EOS}[assistant]"
    )


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (LISTED + CALLED.replace("CALL", PYTHON), r"\[name_of_the_tool\("),
        (
            CALLED.replace("CALL", HERMES + "</tool_call>"),
            "got one that leaves",
        ),  # leaves the tools out
        (LISTED + PLAIN, "got one that leaves"),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN, "no tools"),
    ],
)
def test_a_template_whose_calls_cannot_be_read_is_refused(tmp_path, template, written):
    tokenizer = tokenizer_of(tmp_path, template)

    with pytest.raises(SettingsError, match=f"(?s)writes tool calls as .*{written}"):
        tokenizer.encode_prompt("1+2", TOOLS)


def test_a_model_without_a_template_is_refused(tmp_path):
    tokenizer = tokenizer_of(tmp_path, None)

    with pytest.raises(SettingsError, match="must have a chat template for tools, got none"):
        tokenizer.encode_prompt("1+2", TOOLS)
    with pytest.raises(SettingsError, match="must have a chat template for messages"):
        tokenizer.encode_observation((ChatMessage("tool", "3"),))


READ = {
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "nemotron_3_nano"),
    *("glm4moe", "llama3_1", "llama3_2"),
}
REFUSED = {"gemma3", "gemma4_v5", "phi3", "llama3", "gptoss", "lfm2_v2", "deepseekv3"}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("name", sorted(READ | REFUSED))
def test_templates_of_real_models_are_told_apart(tmp_path, name):
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    template = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    for end in ("<|im_end|>", "<|eot_id|>", "<|call|>"):  # each ends a turn there
        template = template.replace(end, EOS).replace("bos_token", "''")
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    loaded = ModelTokenizer(str(tmp_path), template_kwargs={"date_string": "1 Jan 2026"})

    if name in READ:
        assert re.search(r"\badd\b", loaded.decode(loaded.encode_prompt("1+2", TOOLS)))
        assert "3" in loaded.decode(loaded.encode_observation((ChatMessage("tool", "3"),)))
    else:
        with pytest.raises(SettingsError, match=r"that writes (tool calls as|results of)"):
            loaded.encode_prompt("1+2", TOOLS)
