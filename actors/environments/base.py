"""Interface of environments, for one turn and for several, and the split of held-out questions.

An environment turns (index, seed) into a conversation. It is deterministic: the same (index, seed)
and the same sampled texts give the same observations, which is how an episode continues on another
actor. Text in, text out: the episode loop owns tokens, masks and log-probs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from actors.chat import GivenPrompt
from configs.errors import SettingsError


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
    """Further figures that are recorded with the episode and change no reward."""

    def judged(self, parts: Mapping[str, float]) -> Score:
        """Return the score of reward functions: the sum of `parts`, with this score as a part."""
        environment_parts = self.parts | {"environment": self.reward}
        return Score(sum(parts.values()), environment_parts | dict(parts), self.metrics)


class Segment(NamedTuple):
    """A stretch of a demonstration: one turn of the policy (`trained`), or an observation."""

    text: str
    trained: bool


class Conversation(Protocol):
    """One episode in the making.

    It may have `columns`, a mapping of further values that a reward function can ask for by name,
    and `tools`, a JSON list of functions for the chat template.
    """

    @property
    def prompt(self) -> GivenPrompt:
        """The first input of the policy: a text, or for chat models a list of messages."""
        ...

    @property
    def answer(self) -> str | None:
        """The reference answer for reward functions, if there is one."""
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
    """Source of the conversations of a run.

    `begin`, `step` and `score` may be `async`: they are then awaited in one event loop,
    for all episodes side by side. Other methods are called in threads: a class with
    `is_thread_safe = True` is made once, any other class once for each thread, which keeps the
    episodes that it began. A method `another` makes the next instance from the first, where that
    saves reading a file again.

    A class whose answers depend on more than (index, seed, texts), such as a live web page, sets
    `can_replay = False`: an episode of such a class that loses its actor starts from scratch.
    """

    def begin(self, index: int, seed: int, *, held_out: bool) -> Conversation:
        """Make the conversation of an item; held-out items never appear in training."""
        ...

    def describe(self) -> str:
        """Return a stable text of name, version and settings; processes compare its hash."""
        ...


# --------------------------------------------------------------------------------------------------
# Held-out items: a tenth of all questions, chosen by the question itself.
#
# An item is held out iff the hash of its question falls into one bucket of ten. Training skips
# these and evaluation takes only these, so the two never share a question, however small the space
# of questions is and whatever seeds the runs have. Probing is deterministic: every process finds
# the same item for an index.

BUCKETS = 10
MAX_PROBES = 2000  # at one bucket of ten, missing this often by chance has a probability of 1e-92
STRIDE = 7_368_787  # a prime, and far from 0 modulo round sizes: neighbours' probes never meet

T = TypeVar("T")


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to evaluation; the same answer in every process."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % BUCKETS == 0


def item_on_side(
    index: int, make: Callable[[int], T], question: Callable[[T], str], *, held_out: bool
) -> T:
    """Return the item of `index` that lies on the wanted side of the split.

    Args:
        index: Number of the item.
        make: Makes the candidate of a number; must be deterministic.
        question: Returns the text of a candidate, which decides its side.
        held_out: The wanted side.

    Raises:
        SettingsError: No candidate lies on that side: there are too few questions to split.
    """
    for attempt in range(MAX_PROBES):
        candidate = make(index + attempt * STRIDE)
        if is_held_out(question(candidate)) == held_out:
            return candidate
    side = "held-out" if held_out else "training"
    raise SettingsError(
        f"run.environment_settings must leave some {side} questions, got none among {MAX_PROBES} "
        "items; make the task larger, for example with longer words or a wider range of numbers"
    )
