"""Calls of tools in the text of a turn, in the forms in which families of models write them.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                       Hermes
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>          Qwen3-Coder
    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>              GLM
    {"name": "add", "parameters": {"a": 1}}                                             Llama 3
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                                Mistral
    [TOOL_CALLS]add[ARGS]{"a": 1}                                                       Mistral
    <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>                      DeepSeek
    <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>  Kimi
    <invoke name="add"><parameter name="a">1</parameter></invoke>                       MiniMax
    <|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|>                   Phi-4-mini
    <|tool_call>call:add{a:1}<tool_call|>                                               Gemma 4

Which of them a model has, its chat template tells, whose own text is read back
(`engine/tokenizer.py`): what looks like a call of another family is text that the model quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FAMILIES = (
    "Qwen2.5, Qwen3 and other models of Hermes' form, Qwen3-Coder, Qwen3.5, Nemotron 3, GLM-4.5, "
    "Llama 3, Mistral, DeepSeek, Kimi K2, MiniMax M2, Phi-4-mini or Gemma 4"
)
END_OF_THINKING = "</think>"
MAX_DEPTH = 100  # far below what Python, and templates in it, can nest


class ToolCall(NamedTuple):
    """One call that a policy has written."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""
    """What the policy calls it, where its form has that."""


class _Form(NamedTuple):
    """How a family writes calls."""

    begin: str
    """Stands before each call."""
    end: str
    """Stands behind it; empty = the next call begins, or the turn ends."""
    call: re.Pattern[str] | None = None
    """Its name, and its arguments as `json`, `quoted` or `parameters`; None = all of it is JSON."""
    end_of_parameter: str = ""
    parameter: re.Pattern[str] | None = None
    """Name and value of a parameter."""
    opening: str = ""
    """Stands before the first call."""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_IN_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_FORMS = (
    _Form("<tool_call>", "</tool_call>"),
    _Form(
        "<tool_call>",
        "</tool_call>",
        _pattern(r"<function=(?P<name>[^<>]+)>(?P<parameters>.*)</function>"),
        "</parameter>",
        _pattern(r"\s*<parameter=([^<>]+)>\n?(.*?)\n?"),
    ),
    _Form(
        "<tool_call>",
        "</tool_call>",
        _pattern(r"(?P<name>[\w.-]+)(?P<parameters>.*)"),
        "</arg_value>",
        _pattern(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*)"),
    ),
    _Form("[TOOL_CALLS]", ""),
    _Form(
        "[TOOL_CALLS]",
        "",
        _pattern(r"(?P<name>[^\[\]]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\](?P<json>.*)"),
    ),
    _Form(
        *_DEEPSEEK,
        _pattern(r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<json>.*)\n```"),
        opening=_IN_DEEPSEEK,
    ),
    _Form(*_DEEPSEEK, _pattern(r"(?P<name>[^<]+)<｜tool▁sep｜>(?P<json>.*)"), opening=_IN_DEEPSEEK),
    _Form(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _pattern(
            r"(?P<id>(?:functions\.)?(?P<name>[^<:\s]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
            r"(?P<json>.*)"
        ),
        opening="<|tool_calls_section_begin|>",
    ),
    _Form(
        "<invoke name=",
        "</invoke>",
        _pattern(r'"(?P<name>[^"]+)">(?P<parameters>.*)'),
        "</parameter>",
        _pattern(r'\s*<parameter name="([^"]+)">(.*)'),
        opening="<minimax:tool_call>",
    ),
    _Form("<|tool_call|>", "<|/tool_call|>"),
    _Form("<|tool_call>", "<tool_call|>", _pattern(r"call:(?P<name>[^{]+)(?P<quoted>.*)")),
)


BEGINS = (*dict.fromkeys(form.begin for form in _FORMS), "")
"""What stands before each call, by form; nothing where all of a turn is one (Llama 3)."""


def read_calls(
    text: str, functions: Sequence[Any] = (), begin: str | None = None
) -> list[ToolCall]:
    """Return the calls of a turn after its thinking; no call if one of them is malformed.

    A last call that is not closed is left out.

    Args:
        text: What the policy wrote.
        functions: Functions that it may call, as chat templates take them: parameters that are no
            JSON are read by their types.
        begin: What its own form has before each call, of `BEGINS`; None = what the text has first.

    Example:
        >>> read_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1}, call_id='')]
    """
    return split_calls(text.rpartition(END_OF_THINKING)[2], functions, begin)[1]


def split_calls(
    text: str, functions: Sequence[Any] = (), begin: str | None = None
) -> tuple[str, list[ToolCall]]:
    """Return what a turn says before its calls, and the calls; all of it if there are none.

    Args:
        text: What the policy wrote after its thinking.
        functions: As for `read_calls`.
        begin: As for `read_calls`.
    """
    begins = _begins_in(text) if begin is None else (begin,)
    for form in _FORMS:
        if form.begin not in begins:
            continue
        blocks = _blocks(form, text)
        calls = [_read_block(form, block.strip(), functions) for block in blocks]
        if calls and all(calls):
            said = text.partition(form.begin)[0].strip().removesuffix(form.opening).strip()
            return said, [call for several in calls for call in several]
    said = text.strip()
    if "" in begins and said.startswith("{") and (of_text := _read_json(said, "parameters")):
        return "", of_text
    return text, []


def _begins_in(text: str) -> tuple[str, ...]:
    """Return what may begin calls in a text of an unknown form."""
    if text.lstrip().startswith("{"):
        return ("",)
    places = [(text.index(begin), begin) for begin in BEGINS if begin and begin in text]
    return (min(places)[1],) if places else ()


def _blocks(form: _Form, text: str) -> list[str]:
    """Return what stands between begin and end of each call; one that is cut off is left out."""
    if not form.end:
        return text.split(form.begin)[1:]
    blocks, end = [], 0
    while (begin := text.find(form.begin, end)) >= 0:
        begin += len(form.begin)
        end = text.find(form.end, begin)
        if end < 0:
            break
        blocks.append(text[begin:end])
    return blocks


def _read_block(form: _Form, block: str, functions: Sequence[Any]) -> list[ToolCall]:
    if form.call is None:
        return _read_json(block, "arguments")
    match = form.call.fullmatch(block)
    if match is None:
        return []
    parts = match.groupdict()
    name = parts["name"].strip()
    arguments: Any
    if form.parameter is None:
        arguments = _loads(parts["json"] if "json" in parts else _unquoted(parts["quoted"]))
    else:
        arguments = _read_parameters(form, parts["parameters"], _schemas(functions, name))
    call = ToolCall(name, arguments, parts.get("id") or "")
    return [call] if _is_sound(call) else []


def _read_json(text: str, key: str) -> list[ToolCall]:
    """Read a call, or a list of calls, that is JSON."""
    value = _loads(text)
    calls = []
    for part in value if isinstance(value, list) else [value]:
        if not isinstance(part, dict):
            return []
        call_id = part.get("id")
        arguments: Any = part.get(key)
        call_id = call_id if isinstance(call_id, str) else ""
        calls.append(ToolCall(part.get("name", ""), arguments, call_id))
    return calls if all(map(_is_sound, calls)) else []


def _read_parameters(form: _Form, text: str, schemas: Mapping[str, Any]) -> dict[str, Any] | None:
    *parameters, rest = text.split(form.end_of_parameter)
    assert form.parameter is not None
    matches = [form.parameter.fullmatch(parameter) for parameter in parameters]
    if rest.strip() or not all(matches):
        return None
    named = [(match[1].strip(), match[2]) for match in matches if match]
    return {name: _value(text, schemas.get(name)) for name, text in named}


def _schemas(functions: Sequence[Any], name: str) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters; agents may send anything as functions."""
    for tool in functions:
        function = _at(tool, "function") or tool
        if isinstance(function, Mapping) and function.get("name") == name:
            return _at(_at(function, "parameters"), "properties")
    return {}


def _at(value: Any, key: str) -> Mapping[str, Any]:
    inner = value.get(key) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


QUOTE = '<|"|>'
_KEY = re.compile(r"([{,]\s*)([^{}\[\],:\s]+)\s*:")


def _unquoted(text: str) -> str:
    """Return JSON for what has quotes of its own around texts, and none around keys."""
    parts = text.split(QUOTE)
    parts[::2] = [_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


WORDS = {"True": True, "False": False, "None": None}  # as a template writes them


def _value(text: str, schema: Any) -> Any:
    """Read a value that is text or JSON, by the type of its parameter."""
    options = [schema]
    for key in ("anyOf", "oneOf"):
        more = schema.get(key) if isinstance(schema, Mapping) else None
        options += more if isinstance(more, list) else []
    types = [option.get("type") for option in options if isinstance(option, Mapping)]
    named = [t for type_ in types for t in (type_ if isinstance(type_, list) else [type_])]
    is_null = text in ("null", "None") and "null" in named
    if "string" in named and not is_null:
        return text
    if text in WORDS:
        return WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_sound(call: ToolCall) -> bool:
    """Whether a call has a name and arguments that can be written again."""
    if not (isinstance(call.name, str) and call.name and isinstance(call.arguments, dict)):
        return False
    if _is_deeper(call.arguments, MAX_DEPTH):
        return False
    try:
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # half of a surrogate pair, such as "\\ud83d", and no JSON, such as 1e400
        return False
    return True


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and (
        depth == 0 or any(_is_deeper(part, depth - 1) for part in parts)
    )
