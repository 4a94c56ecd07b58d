"""Content of calls and replies of live agents, as door and actor write it.

The store and the broker's messages carry these as bytes that they do not read.

A call is a line with its route, then a JSON object. It has only fields that the actor heeds
(`CHAT_FIELDS`, `GENERATE_FIELDS`), in the agent's own bytes, with the longest field last: so the
calls of a growing conversation share a prefix, and only what follows it is stored.

Example:
    stored = encode_call(AgentCall("chat", b'{"messages":[]}'))
    assert decode_call(stored).route == "chat"
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from configs.errors import RecordError, quoted

from .fields import MessagePart, Text

MAX_BODY_BYTES = 8 * 2**20
"""Longest body of a call: a conversation of a million tokens takes half of it."""
MAX_REPLY_BYTES = 8 * 2**20
"""Longest reply: 2^18 tokens with text, ids and log-probs."""
MAX_TOKENS = 2**20
MAX_TOOL_CALLS = 256  # of one turn: models make a few at a time
MAX_ERROR = 2_000  # characters

Route = Literal["chat", "generate"]
"""`chat`: messages in, the actor renders and parses; `generate`: tokens in, tokens out."""

CHAT_FIELDS = (
    "chat_template_kwargs",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "reasoning_effort",
    "return_token_ids",
    "stop",
    "tool_choice",
    "tools",
    "messages",
)
"""`tool_choice` is `auto` or `none`. An answer has token ids and log-probs where they are asked."""
GENERATE_FIELDS = ("max_tokens", "stop", "stop_token_ids", "token_ids")
"""An answer has `completion_ids` and `logprobs`."""


class AgentCall(NamedTuple):
    """A call of an agent. Producer: the door. Consumer: the actor."""

    route: Route
    body: bytes
    """JSON object."""


class CalledTool(MessagePart, frozen=True):
    """A function that the model wants called."""

    call_id: Text
    name: Text
    arguments: str
    """JSON, as the model wrote it."""


Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class AgentAnswer(
    Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="answer"
):
    """What the model said. Producer: the actor. Consumer: the door."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: Count
    num_completion_tokens: Count
    text: str = ""
    reasoning: str = ""
    tool_calls: Annotated[tuple[CalledTool, ...], Meta(max_length=MAX_TOOL_CALLS)] = ()
    prompt_ids: Tokens = b""
    """int32, little-endian; empty unless they are asked for."""
    completion_ids: Tokens = b""
    """As `prompt_ids`."""
    logprobs: Tokens = b""
    """For each token of the completion, float32, little-endian; empty unless they are asked for."""
    pieces: Annotated[tuple[bytes, ...], Meta(max_length=MAX_TOKENS)] = ()
    """Bytes of each token of the completion, for log-probs of the route `chat`."""


class AgentError(Struct, frozen=True, forbid_unknown_fields=True, tag="error"):
    """A call that the actor refuses. Producer: the actor. Consumer: the door."""

    status: Annotated[int, Meta(ge=400, le=599)]
    """Status of HTTP."""
    text: Annotated[str, Meta(max_length=MAX_ERROR)]
    field: Annotated[str, Meta(max_length=200)] = ""
    """Field of the call that is at fault; empty = none."""


AgentReply: TypeAlias = AgentAnswer | AgentError


_WRITER = Encoder()
_REPLIES: Decoder[AgentReply] = Decoder(AgentAnswer | AgentError)
_MALFORMED = (MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def encode_call(call: AgentCall) -> bytes:
    """Turn a call into the bytes that the mailbox keeps."""
    return f"{call.route}\n".encode() + call.body


def decode_call(stored: bytes) -> AgentCall:
    """Turn bytes of the mailbox back into a call; its body is not read.

    Raises:
        RecordError: The bytes are no call.
    """
    route, line_end, body = stored.partition(b"\n")
    for name in get_args(Route):
        if line_end and route == name.encode() and len(body) <= MAX_BODY_BYTES:
            return AgentCall(name, body)
    raise RecordError(
        f"a call must be a line with its route, chat or generate, then at most {MAX_BODY_BYTES} "
        f"bytes of JSON, got {len(stored)} bytes, which begin {quoted(route, 20)}; use the same "
        "release of Nyala on all machines"
    )


def encode_reply(reply: AgentReply) -> bytes:
    """Turn a reply into the bytes that the mailbox keeps.

    Raises:
        RecordError: Its parts do not fit each other, or it is too long.
    """
    stored = _WRITER.encode(reply)
    decode_reply(stored)
    return stored


def decode_reply(stored: bytes) -> AgentReply:
    """Turn bytes of the mailbox back into a reply.

    Raises:
        RecordError: The bytes are no reply.
    """
    if len(stored) > MAX_REPLY_BYTES:
        raise RecordError(
            f"a reply must be at most {MAX_REPLY_BYTES} bytes, got {len(stored)}; lower "
            "run.max_completion_tokens"
        )
    try:
        reply = _REPLIES.decode(stored)
    except _MALFORMED as error:
        raise RecordError(
            f"a reply must have the fields of its type, got: {error!s:.300}; use the same release "
            "of Nyala on all machines"
        ) from None
    if isinstance(reply, AgentAnswer):
        _check_lengths(reply)
    return reply


def _check_lengths(answer: AgentAnswer) -> None:
    prompt, completion = answer.num_prompt_tokens, answer.num_completion_tokens
    for name, got, tokens in (
        ("prompt_ids", len(answer.prompt_ids), 4 * prompt),
        ("completion_ids", len(answer.completion_ids), 4 * completion),
        ("logprobs", len(answer.logprobs), 4 * completion),
        ("pieces", len(answer.pieces), completion),
    ):
        if got not in {0, tokens}:
            raise RecordError(
                f"{name} of a reply must be empty or have the length {tokens}, got {got}; use the "
                "same release of Nyala on all machines"
            )
    if not np.isfinite(np.frombuffer(answer.logprobs, "<f4")).all():
        raise RecordError("logprobs of a reply must be finite, got others; see the actor's log")


def ids_of(tokens: bytes) -> list[int]:
    """Return token ids of a reply."""
    ids: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return ids


def logprobs_of(logprobs: bytes) -> list[float]:
    """Return log-probs of a reply."""
    values: list[float] = np.frombuffer(logprobs, "<f4").tolist()
    return values
