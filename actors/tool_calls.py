"""Calls of tools in the text of a turn, in two forms.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>    Hermes, Qwen2.5, Qwen3: several
    {"name": "add", "parameters": {"a": 1}}                          Llama 3: one, with nothing else

Whether a chat template writes calls in one of them is found out by reading back what it writes
(`engine/tokenizer.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

FORMS = "<tool_call> with JSON (Hermes, Qwen2.5, Qwen3) or bare JSON (Llama 3)"
HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
END_OF_THINKING = "</think>"


class ToolCall(NamedTuple):
    """One call that a policy has written."""

    name: str
    arguments: Mapping[str, Any]


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls of a turn, thinking left out; none where one of them is malformed.

    Example:
        >>> read_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1})]
    """
    said = text.rpartition(END_OF_THINKING)[2].strip()
    found = [_read(block, "arguments") for block in HERMES.findall(said)]
    if not found and said.startswith("{"):
        found = [_read(said, "parameters")]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _read(text: str, key: str) -> ToolCall | None:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    name, arguments = given.get("name"), given.get(key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)
