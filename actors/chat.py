"""Prompts that are the messages of a chat, and what is said in an episode, as messages.

An environment's prompt is a text, or a list of messages as datasets have them: `[{"role": "user",
"content": "..."}]`. Inside, a message is a `Message`, so that prompts can be kept by their value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from configs.errors import SettingsError


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
GivenPrompt = str | Sequence[Mapping[str, Any]]
"""A prompt as environments give it."""


def read_prompt(given: GivenPrompt, what: str = "the prompt of an item") -> Prompt:
    """Return a prompt, or an observation, as text or messages.

    Raises:
        SettingsError: It is neither, or its last message is the policy's own.

    Example:
        >>> read_prompt([{"role": "user", "content": "7+8="}])
        (Message(role='user', content='7+8='),)
    """
    if isinstance(given, str):
        return given
    messages = tuple(_message(each, what) for each in given)
    if not messages or messages[-1].role == "assistant":
        raise SettingsError(
            f"{what} must end with a message to the policy, got "
            f"{'one of the assistant' if messages else 'none'}; give it as the answer instead"
        )
    return messages


def text_of(prompt: Prompt) -> str:
    """Return a prompt as one text, for those who know no messages."""
    return prompt if isinstance(prompt, str) else "\n".join(each.content for each in prompt)


def as_messages(said: Prompt) -> tuple[Message, ...]:
    """Return an observation as messages: a text is said by the user."""
    return (Message("user", said),) if isinstance(said, str) else said


def as_given(messages: Iterable[Message]) -> list[dict[str, str]]:
    """Return messages in the form that chat templates and other projects' functions take."""
    return [each._asdict() for each in messages]


def _message(given: Any, what: str) -> Message:
    # Tables fill what a message lacks with null.
    filled = (
        {key: value for key, value in given.items() if value is not None}
        if isinstance(given, Mapping)
        else {}
    )
    if filled.keys() != {"role", "content"} or not all(isinstance(v, str) for v in filled.values()):
        raise SettingsError(
            f"{what} must be a text, or messages of role and content, both text, "
            f"got {given!r:.80}; tool calls and images are not supported"
        )
    return Message(filled["role"], filled["content"])
