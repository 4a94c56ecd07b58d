"""Calls of live agents as chats or tokens, and turns of the policy as answers to them.

Only what a call asks for is read here; whose tokens it goes on with is decided in
`agent_rollout.py`. Messages are equal where role, content and calls are: ids of calls, the spacing
of their arguments, and reasoning that an agent leaves out make no difference. No I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from actors.chat import ChatMessage, without_half_pairs
from actors.engine.tokenizer import Chat
from actors.tool_calls import END_OF_THINKING, ToolCall, split_calls
from broker.protocol.agent_calls import MAX_TOOL_CALLS, AgentAnswer, AgentCall, CalledTool
from broker.protocol.fields import MAX_TEXT
from buffer.record.episode import Completion
from configs.errors import quoted

BEGIN_OF_THINKING = "<think>"
TEMPLATE_ROLES = {"developer": "system"}
"""Roles that chat templates know by another name."""


class CallError(ValueError):
    """A call that is answered with an error, which its agent can act on."""

    def __init__(self, text: str, *, field: str = "") -> None:
        super().__init__(text)
        self.text, self.field = text, field


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a call asks for; either a chat or tokens."""

    chat: Chat | None = None
    token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    has_tools: bool = False
    """Calls of tools are looked for in the turn."""
    wants_ids: bool = False
    wants_logprobs: bool = False


_Positive = Annotated[int, Meta(ge=1)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_StopString = Annotated[str, Meta(min_length=1)]


class _Body(Struct):
    """Fields of a call; of its route's own the others are null."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_ids: bool | None = None
    logprobs: bool | None = None
    token_ids: tuple[_TokenId, ...] | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    stop: _StopString | list[_StopString] | None = None
    stop_token_ids: list[_TokenId] | None = None


def read_request(call: AgentCall) -> TurnRequest:
    """Read the body of a call.

    Raises:
        CallError: It is not of the form of its route.
    """
    try:
        body = msgspec.convert(_read_json(call.body), _Body)
    except (ValueError, RecursionError) as error:
        raise CallError(
            f"the body must be JSON of its route's fields, got: {error!s:.200}"
        ) from None
    limits: dict[str, Any] = {
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "stops": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
    }
    if call.route == "generate":
        if not body.token_ids:
            raise CallError("token_ids must be a list of token ids", field="token_ids")
        return TurnRequest(token_ids=body.token_ids, wants_ids=True, wants_logprobs=True, **limits)
    if not body.messages:
        raise CallError("messages must be a list of messages", field="messages")
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    messages = [chat_message(*numbered) for numbered in enumerate(body.messages)]
    return TurnRequest(
        chat=Chat(messages, body.tools or (), variables),
        has_tools=bool(body.tools) and body.tool_choice != "none",
        wants_ids=bool(body.return_token_ids),
        wants_logprobs=bool(body.logprobs),
        **limits,
    )


def prefixes(chat: Chat) -> Iterator[bytes]:
    """Yield a digest of the chat up to each of its messages, the first of none."""
    digest = hashlib.sha256(_canonical([chat.tools, dict(chat.variables)])).digest()
    yield digest
    for message in chat.messages:
        digest = next_prefix(digest, message)
        yield digest


def next_prefix(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a chat with a further message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    said = [message["role"], message["content"], [[f["name"], f["arguments"]] for f in functions]]
    return hashlib.sha256(digest + _canonical(said)).digest()


def said_in(chat: Chat) -> list[ChatMessage]:
    """Return the messages of a chat as reward functions get them, calls as JSON in their text."""
    return [ChatMessage(str(message["role"]), _with_calls(message)) for message in chat.messages]


def answer_of(
    request: TurnRequest,
    text: str,
    *,
    number: int,
    is_cut: bool,
    shows_reasoning: bool,
    is_thinking: bool = False,
    begin_of_call: str | None = None,
) -> tuple[AgentAnswer, dict[str, Any]]:
    """Return the answer to a call, without its tokens, and the turn as a message.

    Args:
        request: What the call asked for.
        text: Text of the turn, without what ended it.
        number: Number of the call, which ids of tool calls are made of.
        is_cut: The turn was cut by a limit.
        shows_reasoning: Reasoning is a field of its own in the model's chat template.
        is_thinking: The prompt has begun the turn's thinking.
        begin_of_call: What the model writes before each call of a tool; None = it may be any form.
    """
    reasoning, content = "", text
    has_thought = is_thinking or text.startswith(BEGIN_OF_THINKING) or END_OF_THINKING in text
    if request.chat is not None and shows_reasoning and has_thought:
        reasoning, _, content = text.partition(END_OF_THINKING)
        reasoning = reasoning.removeprefix(BEGIN_OF_THINKING).strip("\n")
        content = content.lstrip("\n")
    said, calls = content, list[ToolCall]()
    if request.chat is not None and request.has_tools and not is_cut:
        said, calls = split_calls(content, request.chat.tools, begin_of_call)
    if len(calls) > MAX_TOOL_CALLS or any(len(c.name + c.call_id) > MAX_TEXT for c in calls):
        said, calls = content, []  # no reply could have them
    ids = [call.call_id for call in calls]
    if not all(ids) or len(set(ids)) < len(ids):  # nine letters and digits, for Mistral's template
        ids = [f"c{number:05}{place:03}" for place in range(len(calls))]
    tool_calls = tuple(
        CalledTool(call_id, call.name, json.dumps(call.arguments, ensure_ascii=False))
        for call_id, call in zip(ids, calls, strict=True)
    )
    finish: Literal["stop", "length", "tool_calls"] = (
        "length" if is_cut else "tool_calls" if calls else "stop"
    )
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            _function(call.call_id, call.name, call.arguments) for call in tool_calls
        ]
    return AgentAnswer(finish, 0, 0, said, reasoning, tool_calls), message


def token_fields(
    request: TurnRequest,
    prompt_ids: Sequence[int],
    turn: Completion,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Return the fields of an answer that are about its tokens."""
    fields: dict[str, Any] = {
        "num_prompt_tokens": len(prompt_ids),
        "num_completion_tokens": len(turn.token_ids),
    }
    if request.wants_ids:
        fields["prompt_ids"] = np.array(prompt_ids, "<i4").tobytes()
        fields["completion_ids"] = turn.token_ids.astype("<i4").tobytes()
    if request.wants_logprobs:
        fields["logprobs"] = turn.behaviour_logprobs.astype("<f4").tobytes()
        if request.chat is not None:
            fields["pieces"] = tuple(decode([token]).encode() for token in turn.token_ids.tolist())
    return fields


def chat_message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates take it.

    Args:
        number: Place of the message, from 0.
        message: A message as agents and datasets write it; arguments of calls may be JSON text.

    Raises:
        CallError: It has no role, or is more than text and calls of tools.
    """
    where = f"messages[{number}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise CallError(f"{where} must have a role", field="messages")
    kept: dict[str, Any] = {
        "role": TEMPLATE_ROLES.get(role, role),
        "content": _content(where, message.get("content")),
    }
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        kept["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        listed = calls if isinstance(calls, list) else [calls]
        kept["tool_calls"] = [_tool_call(where, call) for call in listed]
    kept |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    return kept


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content or ""]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    said = [text for text in texts if isinstance(text, str)]
    if len(said) < len(texts):
        raise CallError(
            f"{where}.content must be text, got {quoted(content, 60)}; leave images and files out",
            field="messages",
        )
    return "".join(said)


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError(f"{where}.tool_calls must have functions with names", field="messages")
    return _function(str(call.get("id", "")), function["name"], function.get("arguments", ""))


def _function(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            parsed = _read_json(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _read_json(text: str | bytes) -> Any:
    """Read JSON, with U+FFFD for halves of surrogate pairs."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError):  # such a half, NaN, or no JSON
        value = json.loads(text)
    return json.loads(without_half_pairs(json.dumps(value, ensure_ascii=False)))


def _with_calls(message: Mapping[str, Any]) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in _calls(message)]
    return "\n".join(filter(None, [str(message["content"]), *calls]))


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    return calls


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
