"""Interface of environments, for one turn and for several.

An environment turns (index, seed) into a conversation. It is deterministic: the same (index, seed)
and the same sampled texts give the same observations, which is how an episode continues on another
actor. Text in, text out: the episode loop owns tokens, masks and log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from actors.chat import GivenPrompt


@dataclass(frozen=True, slots=True)
class Step:
    """Answer of an environment to a sampled text."""

    observation: GivenPrompt = ""
    """Text appended to the context, or messages such as `[{"role": "tool", "content": "7"}]`;
    masked out of the loss; empty when done."""
    done: bool = True


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a finished episode."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts; `exact` (0 or 1) is what evaluations report as accuracy."""
    metrics: dict[str, float] = field(default_factory=dict)


class Segment(NamedTuple):
    """A stretch of a demonstration: one turn of the policy (`trained`), or an observation."""

    text: str
    trained: bool


class Conversation(Protocol):
    """One episode in the making.

    It may have `columns`, a mapping: what else a reward function can ask for by name; and `tools`,
    JSON: the list of functions that a chat template is given.
    """

    @property
    def prompt(self) -> GivenPrompt:
        """What the policy sees first: a text, or for chat models a list of messages."""
        ...

    @property
    def answer(self) -> str | None:
        """A reference answer where there is one; given to rewards."""
        ...

    @property
    def demonstration(self) -> tuple[Segment, ...]:
        """One right way to go on from the prompt, for a supervised start; may be empty."""
        ...

    def step(self, text: str) -> Step:
        """Take the text of one sampled turn (without the end token) and answer.

        A turn that the token limit cut off is passed too; the answer to it is ignored.
        """
        ...

    def score(self) -> Score:
        """Judge the episode; called once, after the last turn or when the token limit ended it."""
        ...


def columns_of(conversation: Conversation) -> dict[str, Any]:
    """Further columns of an item for reward functions: its optional attribute `columns`."""
    return dict(getattr(conversation, "columns", {}))


def tools_of(conversation: Conversation) -> str:
    """Functions that the policy may call, as JSON: its optional attribute `tools`."""
    tools: str = getattr(conversation, "tools", "")
    return tools


class Environment(Protocol):
    """Source of conversations.

    `begin`, `step` and `score` may be `async`: they are then awaited in one event loop,
    for all episodes side by side. Others are called in threads: a class with `is_thread_safe =
    True` is made once, any other once for each thread, which keeps the episodes that it began. A
    method `another` makes the next one from the first, where that saves reading a file again.

    One whose answers depend on more than (index, seed, texts), such as a live web page, sets
    `can_replay = False` in its class: an episode of it that loses its actor starts from scratch.
    """

    def begin(self, index: int, seed: int, *, held_out: bool) -> Conversation:
        """Make the conversation of an item; held-out items never appear in training."""
        ...

    def describe(self) -> str:
        """A stable text of name, version and settings; its hash is compared between processes."""
        ...
