"""Answers to agents: completions whole and streamed, tokens, and errors, in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from broker.protocol.agent_calls import AgentAnswer, ids_of, logprobs_of

from .requests import AgentRequest, RequestError

MODEL = "nyala"
"""Name of the run's model where an agent asks for a list, or gives none."""
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""A comment of an event stream, which clients skip."""


class _TokenLogprob(Struct, gc=False):
    """A sampled token: of 2^18, objects that nobody collects are made in a tenth of the time."""

    token: str
    logprob: float
    top_logprobs: tuple[()] = ()
    token_id: int | UnsetType = UNSET
    bytes: tuple[int, ...] | UnsetType = UNSET


def completion(
    request: AgentRequest, answer: AgentAnswer, number: int, at: float
) -> dict[str, Any]:
    """Return the body of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(answer)}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = _tool_calls(answer)
    choice: dict[str, Any] = {"index": 0}
    choice |= {"message": message, "logprobs": None} | _end_of_choice(request, answer)
    body = _head(request, number, at, "chat.completion")
    if request.has_ids:
        body["prompt_token_ids"] = ids_of(answer.prompt_ids)
        choice["token_ids"] = ids_of(answer.completion_ids)
    return body | {"choices": [choice], "usage": _usage(answer)}


def events(request: AgentRequest, answer: AgentAnswer, number: int, at: float) -> Iterator[bytes]:
    """Yield the events of a streamed chat completion: the whole text at once, then the end."""
    head = _head(request, number, at, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": _content(answer)}
    if answer.reasoning:
        delta["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        calls = enumerate(_tool_calls(answer))
        delta["tool_calls"] = [{"index": index} | call for index, call in calls]
    first: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
    if request.has_ids:
        head |= {"prompt_token_ids": ids_of(answer.prompt_ids)}
        first["token_ids"] = ids_of(answer.completion_ids)
    yield _event(head | {"choices": [first]})
    head.pop("prompt_token_ids", None)
    last = {"index": 0, "delta": {}} | _end_of_choice(request, answer)
    usage = {"usage": _usage(answer)}
    if request.has_usage_event:
        yield _event(head | {"choices": [last]})
        yield _event(head | {"choices": []} | usage)
    else:  # clients that have not asked for it take the first choice of every event
        yield _event(head | {"choices": [last]} | usage)
    yield DONE


def generated(answer: AgentAnswer, number: int) -> dict[str, Any]:
    """Return the body of an answer in tokens."""
    ids = ids_of(answer.completion_ids)
    content = [
        _TokenLogprob(f"token_id:{i}", logprob, token_id=i)
        for i, logprob in zip(ids, logprobs_of(answer.logprobs), strict=False)
    ]
    # Without text there are no calls of tools: the agent reads them from the tokens.
    finish = "length" if answer.finish_reason == "length" else "stop"
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": finish,
        "logprobs": {"content": content},
    }
    return {"request_id": f"call-{number}", "choices": [choice], "usage": _usage(answer)}


def models() -> dict[str, Any]:
    """Return the list of models: the one of the run."""
    return {"object": "list", "data": [model(MODEL)]}


def model(name: str) -> dict[str, Any]:
    """Return the model of the run under a name; any will do."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "nyala"}


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"message": error.text, "type": kind, "param": error.field, "code": error.code}
    return {"error": fields}


def error_event(error: RequestError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event(error_body(error))


def _head(request: AgentRequest, number: int, at: float, kind: str) -> dict[str, Any]:
    model = request.model or MODEL
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(at), "model": model}


def _content(answer: AgentAnswer) -> str | None:
    return answer.text or (None if answer.tool_calls else "")


def _tool_calls(answer: AgentAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.tool_calls
    ]


def _end_of_choice(request: AgentRequest, answer: AgentAnswer) -> dict[str, Any]:
    end: dict[str, Any] = {"finish_reason": answer.finish_reason}
    if request.has_logprobs:
        end["logprobs"] = {"content": _logprobs(answer), "refusal": None}
    return end


def _logprobs(answer: AgentAnswer) -> list[_TokenLogprob]:
    return [
        _TokenLogprob(piece.decode(errors="replace"), logprob, bytes=tuple(piece))
        for piece, logprob in zip(answer.pieces, logprobs_of(answer.logprobs), strict=False)
    ]


def _usage(answer: AgentAnswer) -> dict[str, int]:
    prompt, completion = answer.num_prompt_tokens, answer.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
