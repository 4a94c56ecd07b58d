"""Tokenizer of a small model that a run makes for itself: one character is one token.

There are no merges, so text -> tokens -> text is exact, and the tokens of a turn do not depend on
the text around it. Models for live agents have tokens for roles and for calls of tools, too.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# Every printable ASCII character has a token, so that other tasks can reuse the model.
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_FRAME = ('<tool_call>{"name": "', '", "arguments": {', "}}</tool_call>")
"""What every call has around its name and its arguments, a token each."""
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of a small model: functions are shown by their names, as long prompts take time on
a CPU, and calls are written as Qwen3 writes them."""
MAX_POSITIONS = 4096


def make_tokenizer(
    texts: Iterable[str], *, tools: Iterable[Mapping[str, Any]] | None = None
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each printable ASCII character and each one in `texts`.

    Args:
        texts: Texts whose characters it has.
        tools: Functions that live agents offer: it then has a chat template, and tokens for roles,
            names of functions and of their arguments, and what every call has around them.
    """
    extra = sorted({character for text in texts for character in text} - set(ALPHABET))
    vocabulary = {
        token: token_id for token_id, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET, *extra])
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # joins without spaces
    if tools is not None:
        tokenizer.add_special_tokens([AddedToken(role, normalized=False) for role in ROLES])
        parts = [*CALL_FRAME, *sorted({part for tool in tools for part in _call_parts(tool)})]
        tokenizer.add_tokens([AddedToken(part, normalized=False) for part in parts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=None if tools is None else CHAT_TEMPLATE,
    )


def _call_parts(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yield a function's name, and its arguments as calls write them."""
    function = tool["function"]
    yield function["name"]
    for argument in function.get("parameters", {}).get("properties", ()):
        yield f"{json.dumps(argument)}: "
