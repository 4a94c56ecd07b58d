"""Small models that were trained to say one thing, or to call one tool."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.demonstrations import DemonstratedEpisode, tokenize
from actors.engine.character_tokenizer import make_tokenizer
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.adapters.tools import Tools
from actors.environments.base import Segment
from buffer.record.demonstrations import DemonstrationsWriter
from configs.settings import LearnerSettings
from learner.initial_model import warm_start

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
    shown, model, writer = folder / "shown", folder / "model", DemonstrationsWriter()
    make_tokenizer(prompts).save_pretrained(shown / "tokenizer")
    tokenizer = ModelTokenizer(str(shown / "tokenizer"))
    segments = tuple(Segment(*segment) for segment in said)
    for prompt in prompts:
        for pieces in tokenize(DemonstratedEpisode(prompt, segments), tokenizer):
            tokens = [(token, piece.is_trained) for piece in pieces for token in piece.token_ids]
            writer.add([token for token, _ in tokens], [is_trained for _, is_trained in tokens])
    writer.write(shown)
    learner = LearnerSettings(
        init_layers=1, init_width=64, warm_start_steps=120, warm_start_batch=16, warm_start_lr=3e-3
    )
    warm_start(learner, seed=0, demonstrations=shown, out=model)
    return model


def write_rows(path: Path, *rows: Mapping[str, object]) -> str:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
