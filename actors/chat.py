"""Chats: messages of prompts and episodes, and columns in their texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from configs.errors import SettingsError, quoted

# --------------------------------------------------------------------------------------------------
# Prompts that are the messages of a chat, and the turns of an episode as messages.
#
# An environment's prompt is a text, or a list of messages as datasets have them: `[{"role": "user",
# "content": "..."}]`. Inside, a message is a `ChatMessage`, so that prompts can be kept by their
# value.


class ChatMessage(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...]
GivenPrompt = str | Sequence[Mapping[str, Any]]
"""A prompt as environments give it."""


def read_prompt(prompt: GivenPrompt, what: str = "the prompt of an item") -> Prompt:
    """Return a prompt, or an observation, as text or messages.

    Half of a surrogate pair, as in the cut text of a tool, becomes U+FFFD.

    Args:
        prompt: A text, or mappings of exactly `role` and `content`; keys with null are left out.
        what: Name of the prompt in errors.

    Raises:
        SettingsError: The prompt is neither, has no message, or ends with one of the assistant.

    Example:
        >>> read_prompt([{"role": "user", "content": "7+8="}])
        (ChatMessage(role='user', content='7+8='),)
    """
    if isinstance(prompt, str):
        return without_half_pairs(prompt)
    if any(isinstance(message, str) for message in prompt):
        raise SettingsError(
            f"{what} must be a text, or messages of role and content, got a list of texts, "
            f"{quoted(list(prompt))}; join them, or put one of them into a column of its own"
        )
    messages = tuple(_read_message(message, what) for message in prompt)
    if not messages or messages[-1].role == "assistant":
        raise SettingsError(
            f"{what} must end with a message to the policy, got "
            f"{'one of the assistant' if messages else 'no message'}; put a message of the user or "
            "of a tool last, and a reference answer into a column of its own"
        )
    return messages


def text_of(prompt: Prompt) -> str:
    """Return a prompt as one text: its messages' contents, a line each, without their roles."""
    return prompt if isinstance(prompt, str) else "\n".join(turn.content for turn in prompt)


def as_messages(said: Prompt) -> tuple[ChatMessage, ...]:
    """Return an observation as messages; a text becomes a message of the user."""
    return (ChatMessage("user", said),) if isinstance(said, str) else said


def as_given(messages: Iterable[ChatMessage]) -> list[dict[str, str]]:
    """Return messages in the form that chat templates and other projects' functions take."""
    return [message._asdict() for message in messages]


def _read_message(message: Any, what: str) -> ChatMessage:
    # In a table, a key that a message lacks is null.
    filled = (
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, Mapping)
        else {}
    )
    if filled.keys() != {"role", "content"} or not all(isinstance(v, str) for v in filled.values()):
        raise SettingsError(
            f"{what} must be a text, or messages of role and content, both text, got "
            f"{quoted(message)}; give each message these two keys and no other, without images or "
            "tool calls, which are not supported"
        )
    return ChatMessage(without_half_pairs(filled["role"]), without_half_pairs(filled["content"]))


def without_half_pairs(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --------------------------------------------------------------------------------------------------
# Columns in braces in a text, such as `Translate: {english}`: prompts and rubrics have them.

_NAME = r"\w+(?:\.\w+)*"
_BRACES = re.compile(rf"\{{\{{{_NAME}\}}\}}|\{{({_NAME})\}}")
KEPT = 64  # more than the texts of a run; asked for every row


def column_at(row: Mapping[str, Any], name: str) -> Any:
    """Return a column, or a value inside of one: by its key, or by its number in a list.

    Raises:
        KeyError: There is no such column or value.

    Example:
        >>> column_at({"reward_model": {"ground_truth": "15"}}, "reward_model.ground_truth")
        '15'
    """
    if name in row:  # tables that were flattened have points in their names
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(name)
    return value


@lru_cache(KEPT)
def columns_in(text: str) -> frozenset[str]:
    """Return the names of the columns that stand in braces in a text."""
    return frozenset(filter(None, _BRACES.findall(text)))


def fill_in(text: str, value: Callable[[str], str]) -> str:
    """Return a text with the value of each column in its place; other braces stay.

    Doubled braces are text: `{{answer}}` becomes `{answer}`.

    Example:
        >>> fill_in("{a} + {b} = {?}", {"a": "7", "b": "8"}.__getitem__)
        '7 + 8 = {?}'
    """
    return _BRACES.sub(lambda part: value(part[1]) if part[1] else part[0][1:-1], text)
