"""Small models that were trained to say one thing, or to call one tool."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.engine.tokenizer import ModelTokenizer
from actors.environments.adapters.tools import Tools
from configs.settings import LearnerSettings
from learner.initial_model import make_tokenizer, warm_start

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<eos>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Of a chat model that lists tools and calls them in Hermes' form."""


def model_that_calls(folder: Path, questions: Sequence[str], *, of: Path, answer: str) -> Path:
    """Train a small model to call the one tool of a class once and then to end its turn.

    Args:
        folder: Where it is made.
        questions: What it is asked.
        of: File of the class `Shop`, whose tool is `pay`.
        answer: Of the tool.
    """
    tools = Tools.from_instance(runpy.run_path(str(of))["Shop"](), setting="Shop").schemas
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    asked = ModelTokenizer(str(folder / "tokenizer"))
    prompts = [asked.decode(asked.encode_prompt(question, tools)) for question in questions]
    call = '<tool_call>{"name": "pay", "arguments": {"n": 5}}</tool_call>'
    result = f"[tool]{answer}<eos>[assistant]"
    model = model_that_says(folder, prompts, (call, True), (result, False), ("paid", True))
    tokenizer.save_pretrained(model)
    return model


def model_that_says(folder: Path, prompts: Sequence[str], *said: tuple[str, bool]) -> Path:
    """Train a small model to answer all with the same."""
    pairs, model = folder / "pairs.jsonl", folder / "model"
    write_rows(pairs, *({"prompt": prompt, "segments": said} for prompt in prompts))
    learner = LearnerSettings(
        init_layers=1, init_width=64, warm_start_steps=120, warm_start_batch=16, warm_start_lr=3e-3
    )
    warm_start(learner, seed=0, pairs_path=pairs, out=model)
    return model


def write_rows(path: Path, *rows: Mapping[str, object]) -> str:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
