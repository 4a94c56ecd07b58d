"""Requests of agents: read, refused where a run cannot do what they ask, and made into calls.

OpenAI's chat completions, and vLLM's route of tokens in and out. What decides the distribution of
the sampled tokens (temperature, top_p, seed, penalties) is the run's: accepted and ignored. What
would sample from another distribution than the recorded log-probs are of is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from broker.protocol.agent_calls import CHAT_FIELDS, GENERATE_FIELDS, AgentCall, encode_call
from broker.protocol.conversation_messages import MAX_PARTS
from broker.protocol.messages import MAX_REASON
from configs.errors import printable_lines, quoted

SAY_SO = "ask for it in a message"
TRAINED = "a run records log-probs of the model itself"
REFUSED: Mapping[str, str] = {
    "allowed_token_ids": TRAINED,
    "audio": "leave it out: answers are texts",
    "bad_words": TRAINED,
    "best_of": "make several calls",
    "content_parts": "leave it out: prompts are texts",
    "continue_final_message": "add a message instead",
    "echo": "leave it out",
    "features": "leave it out: prompts are texts",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "grammar": SAY_SO,
    "ignore_eos": TRAINED,
    "logit_bias": TRAINED,
    "logits_processors": TRAINED,
    "min_tokens": SAY_SO,
    "n": "make several calls, at the same time if you like",
    "prediction": "leave it out",
    "prompt_logprobs": "leave it out",
    "repetition_detection": "use stop",
    "response_format": f"{SAY_SO}, and check the answer",
    "structural_tag": SAY_SO,
    "structured_outputs": SAY_SO,
    "top_logprobs": "leave it out: the log-prob of the sampled token comes with logprobs: true",
    "truncate_prompt_tokens": "cut the messages",
    "use_beam_search": "leave it out",
    "web_search_options": "leave it out",
}
"""Field -> what to do instead of setting it."""
REFUSED_PREFIX = "guided_"
HARMLESS: tuple[object, ...] = (None, False, 0, "", [], {})
AS_DEFAULT: Mapping[str, object] = {"n": 1, "best_of": 1, "response_format": {"type": "text"}}
OF_DOOR = ("model", "stream", "stream_options", "user", "metadata", "store", "request_id")
"""Fields that change no answer, so that nobody needs to be told of them."""
MAX_MODEL = 200  # characters of a model's name
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
MAX_VALUE_BYTES = 2**17
"""Longest field that is read here: stops, each character an escape of six bytes."""


class _Message(Struct):
    """A message of a chat; its other fields are the actor's to read."""

    role: Raw


_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_MESSAGES = msgspec.json.Decoder(list[_Message])
_TOKEN_IDS = msgspec.json.Decoder(list[_TokenId])
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: Status of HTTP.
        text: Text for people.
        field: Field of the request that is at fault.
        code: Name for programs.
        retry_after_s: When to try again; None = never.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.field, self.code = status, text, field, code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for a completion."""

    stored: bytes
    """The call as the mailbox keeps it."""
    digest: bytes
    """The same for requests of the same content."""
    model: str = ""
    """Name that the agent gives the model; any will do."""
    is_streamed: bool = False
    has_usage_event: bool = False
    """`usage` comes in an event of its own, without a choice."""
    has_ids: bool = False
    has_logprobs: bool = False
    ignored: tuple[str, ...] = ()
    """Fields that the run overrides."""


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A reward of the agent's own, or the end of its conversation."""

    number: int
    """Number of the call; 0 = the whole conversation."""
    reward: float | None
    parts: Mapping[str, float]
    is_done: bool
    """Whether the conversation ends."""
    error: str = ""
    """Why the agent gives it up."""


def read_chat(body: bytes) -> AgentRequest:
    """Read a body of `/v1/chat/completions`.

    Raises:
        RequestError: It is malformed, or asks for what a run cannot do.
    """
    fields = _fields(body)
    _check_refused(fields)
    choice = _value(fields, "tool_choice", (str, dict, type(None)), "auto or none")
    if choice not in (None, "auto", "none"):
        raise _refused(
            "tool_choice", "auto or none", choice, "a forced call is not the model's own"
        )
    wanted = "a list of messages, each with a role"
    _check_list(fields, "messages", _MESSAGES, wanted, "add them")
    _check_limits(fields)
    has_logprobs = _flag(fields, "logprobs")
    return AgentRequest(
        *_stored(AgentCall("chat", _joined(fields, CHAT_FIELDS))),
        model=_model(fields),
        is_streamed=_flag(fields, "stream"),
        has_usage_event=_wants_usage(fields),
        has_ids=_flag(fields, "return_token_ids"),
        has_logprobs=has_logprobs,
        ignored=_ignored(fields, CHAT_FIELDS),
    )


def read_generate(body: bytes) -> AgentRequest:
    """Read a body of `/inference/v1/generate`.

    Raises:
        RequestError: It is malformed, or asks for what a run cannot do.
    """
    outer = _fields(body)
    raw = bytes(outer.pop("sampling_params", b"null"))
    fields = outer if raw == b"null" else outer | _fields(raw, "sampling_params")
    _check_refused(fields)
    if _flag(fields, "stream"):
        raise _refused("stream", "false", True, "the answer comes whole")
    if (mode := _value(fields, "output_mode", (str, type(None)), "tokens")) not in {None, "tokens"}:
        raise _refused("output_mode", "tokens", mode, "turn the tokens into text where you ask")
    _check_list(fields, "token_ids", _TOKEN_IDS, "a list of token ids", "render the prompt")
    logprobs = _value(fields, "logprobs", (bool, int, type(None)), "0 or 1")
    if not 0 <= (logprobs or 0) <= 1:
        raise _refused("logprobs", "0 or 1", logprobs, "only the sampled token's are recorded")
    _check_limits(fields)
    heeded = (*GENERATE_FIELDS, "logprobs", "output_mode")
    return AgentRequest(
        *_stored(AgentCall("generate", _joined(fields, GENERATE_FIELDS))),
        model=_model(fields),
        has_ids=True,
        has_logprobs=True,
        ignored=_ignored(fields, heeded),
    )


def read_reward(body: bytes) -> RewardRequest:
    """Read a body of `/reward`.

    Raises:
        RequestError: It is malformed.
    """
    fields = _fields(body)
    if unknown := sorted(set(fields) - {"reward", "parts", "call", "done", "error"}):
        step = "send reward, parts, call, done and error"
        raise _refused(unknown[0], "left out", "a value", step)
    call = _value(fields, "call", (int, str, type(None)), "the id of an answer")
    digits = str(call).removeprefix("chatcmpl-").removeprefix("call-") if call is not None else "0"
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10) or call == "chatcmpl-0":
        raise _refused("call", "the id of an answer, such as chatcmpl-3", call, "leave it out")
    error = _value(fields, "error", (str, type(None)), "a text") or ""
    is_done = _flag(fields, "done") or bool(error)
    reward = _value(fields, "reward", (int, float, type(None)), "a number")
    parts = _value(fields, "parts", (dict, type(None)), "named numbers") or {}
    if len(parts) > MAX_PARTS or not all(type(x) in {int, float} for x in parts.values()):
        raise _refused("parts", f"at most {MAX_PARTS} named numbers", parts, "leave out the others")
    if reward is None and (parts or not is_done):
        raise _refused("reward", "a number", None, "send it, or done: true")
    try:
        whole = None if reward is None else float(reward)
        numbers = {name: float(part) for name, part in parts.items()}
    except OverflowError:
        text = "a number below 1.8e308"
        raise _refused("reward", text, "a larger one", "send rewards of about 1") from None
    reason = printable_lines(error)[-MAX_REASON:]
    return RewardRequest(int(digits), whole, numbers, is_done, reason)


def _fields(body: bytes, name: str = "the body") -> dict[str, Raw]:
    try:
        body.decode()  # values that are not read could have anything between quotes
        return msgspec.json.decode(body, type=dict[str, Raw])
    except _MALFORMED as error:
        raise RequestError(400, f"{name} must be a JSON object, got: {error!s:.200}") from None


def _value(fields: Mapping[str, Raw], name: str, kinds: tuple[type, ...], wanted: str) -> Any:
    value = None
    if len(raw := fields.get(name, b"")) > MAX_VALUE_BYTES:
        raise _refused(name, wanted, f"{len(raw)} bytes", "shorten it")
    if raw:
        try:
            value = msgspec.json.decode(raw)
        except _MALFORMED as error:
            text = f"{name} must be {wanted}, got: {error!s:.200}"
            raise RequestError(400, text, field=name) from None
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise _refused(name, wanted, value, "see docs/agents.md")
    return value


def _check_list(
    fields: Mapping[str, Raw], name: str, decoder: msgspec.json.Decoder[Any], wanted: str, step: str
) -> None:
    """Refuse what is no such list, without making objects of all that is in it."""
    try:
        value = decoder.decode(fields.get(name, b"null"))
    except _MALFORMED as error:
        text = f"{name} must be {wanted}, got: {error!s:.200}; {step}"
        raise RequestError(400, text, field=name, code="unsupported_value") from None
    if not value:
        raise _refused(name, wanted, value, step)


def _stored(call: AgentCall) -> tuple[bytes, bytes]:
    stored = encode_call(call)
    return stored, hashlib.sha256(stored).digest()


def _wants_usage(fields: Mapping[str, Raw]) -> bool:
    options = _value(fields, "stream_options", (dict, type(None)), "an object") or {}
    return bool(options.get("include_usage"))


def _flag(fields: Mapping[str, Raw], name: str) -> bool:
    return bool(_value(fields, name, (bool, type(None)), "true or false"))


def _model(fields: Mapping[str, Raw]) -> str:
    model = _value(fields, "model", (str, type(None)), "a text") or ""
    return str(model)[:MAX_MODEL]


def _check_refused(fields: Mapping[str, Raw]) -> None:
    for name in fields:
        if name not in REFUSED and not name.startswith(REFUSED_PREFIX):
            continue
        value = _value(fields, name, (object,), "left out")
        if value in HARMLESS or (name in AS_DEFAULT and value == AS_DEFAULT[name]):
            continue
        raise _refused(name, "left out", value, REFUSED.get(name, SAY_SO))


def _check_limits(fields: Mapping[str, Raw]) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        limit = _value(fields, name, (int, type(None)), "a whole number")
        if limit is not None and limit < 1:
            raise _refused(name, "a whole number >= 1", limit, "leave it out for the run's own")
    stop = _value(fields, "stop", (str, list, type(None)), "a text or a list of texts") or []
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or not all(
        isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops
    ):
        wanted = f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        raise _refused("stop", wanted, stop, "leave out the others")
    ids = _value(fields, "stop_token_ids", (list, type(None)), "a list of token ids") or []
    if len(ids) > MAX_STOPS or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise _refused("stop_token_ids", f"at most {MAX_STOPS} ids", ids, "leave out the others")


def _joined(fields: Mapping[str, Raw], names: Iterable[str]) -> bytes:
    """Write some fields of an object, in this order, with their values as they are."""
    present = [(name.encode(), bytes(fields[name])) for name in names if name in fields]
    return b"{%s}" % b",".join(b'"%s":%s' % field for field in present if field[1] != b"null")


def _ignored(fields: Iterable[str], heeded: Iterable[str]) -> tuple[str, ...]:
    names = set(fields) - {*heeded, *OF_DOOR, *REFUSED}
    return tuple(sorted(name for name in names if not name.startswith(REFUSED_PREFIX)))


def _refused(name: str, wanted: str, got: object, step: str) -> RequestError:
    return RequestError(
        400,
        f"{name} must be {wanted}, got {quoted(got)}; {step}",
        field=name,
        code="unsupported_value",
    )
