"""Completions of simulated actors: a known answer to every task, so that one wrong token shows.

Token i of a task's completion is a pure function of (task, i), and its log-prob names the version
that it was made by. So a record that mixes tasks, repeats or skips a token, or names another
version, is not the expected one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from actors.environments.base import Score, Segment, Step
from buffer.record.episode import Episode, PolicyVersion
from tests.actors.support.fake_engine import ALPHABET, STOP, CharacterTokenizer

PROMPT_TOKENS = 8
OBSERVATION = "go on"
POISONED = 61
"""One unit in so many makes the environment raise for some of its members, by default."""
TWO_TURNS = 5
"""One unit in so many has episodes of two turns."""


@lru_cache(16384)
def expected(task_id: int, index: int) -> tuple[tuple[int, ...], bytes]:
    """The completion of a task that asks prompt `index`, and its loss mask."""
    first = _turn(task_id, 1)
    if index % TWO_TURNS:
        return first, b"\1" * len(first)
    said, second = CharacterTokenizer().encode_observation(OBSERVATION), _turn(task_id, 2)
    mask = b"\1" * len(first) + b"\0" * len(said) + b"\1" * len(second)
    return first + said + second, mask


def _turn(task_id: int, turn: int) -> tuple[int, ...]:
    seed = zlib.crc32(b"%d.%d" % (task_id, turn))
    # Long episodes are rarer, as in life: lengths from 16 to 400 tokens, half of them below 64.
    length = min(400, int(16 / (1.0 - 0.96 * (seed % 1000) / 1000) ** 0.9) + 24)
    return (*(1 + (seed + 31 * i + i * i) % (len(ALPHABET) - 1) for i in range(length)), STOP)


def logprob(version: PolicyVersion) -> float:
    """A log-prob that float32 keeps exactly and that names its version."""
    return -(version.lineage * 8192 + version.step + 1) / 2**23


def index_of(prompt_ids: Sequence[int]) -> int:
    """Which prompt it is."""
    return int(CharacterTokenizer().decode(prompt_ids))


def check_episode(episode: Episode, group_size: int) -> None:
    """Assert that an episode is exactly what its actors must have made (I3, I4, I11)."""
    completion, task = episode.completion, episode.task_id
    # A group asks the prompt of its own number, or that of an earlier one that was dropped.
    index = index_of(episode.prompt_ids.tolist())
    assert index <= task // group_size, f"I3: task {task} asks prompt {index}"
    tokens, mask = expected(task, index)
    assert tuple(completion.token_ids.tolist()) == tokens, f"I3: tokens of task {task}"
    assert completion.loss_mask.tobytes() == mask, f"I3: loss mask of task {task}"
    fences = [run.fence for run in completion.fences]
    assert fences == sorted(set(fences)), f"I4: fences of task {task}: {fences}"
    check_logprobs(episode)


def check_logprobs(episode: Episode) -> None:
    """Assert that each token was sampled by the version that the episode names (I11)."""
    completion = episode.completion
    says = np.zeros(len(completion.token_ids), dtype=np.float32)
    for span in completion.versions:
        says[span.start :] = logprob(span.version)
    sampled = completion.loss_mask.astype(bool)
    same = (says == completion.behaviour_logprobs)[sampled]
    assert same.all(), f"I11: task {episode.task_id} has tokens of another version than it says"


class Talk:
    """A conversation about nothing."""

    answer = None
    demonstration: tuple[Segment, ...] = ()

    def __init__(self, index: int, poisoned: int) -> None:
        self._index, self._poisoned = index, poisoned
        self._turns = 1 if index % TWO_TURNS else 2
        self.prompt = f"{index:0{PROMPT_TOKENS}d}"

    def step(self, text: str) -> Step:
        self._turns -= 1
        if (
            self._index % self._poisoned == self._poisoned - 1
            and zlib.crc32(text.encode()) % 3 == 0
        ):
            raise ValueError("an environment that cannot judge this")
        return Step("", done=True) if self._turns == 0 else Step(OBSERVATION, done=False)

    def score(self) -> Score:
        return Score(float(self._index % 2), {"exact": float(self._index % 2)})


class Talks:
    """The environment; one unit in `poisoned` has tasks that it cannot judge."""

    def __init__(self, poisoned: int = POISONED) -> None:
        self._poisoned = poisoned

    def begin(self, index: int, seed: int, *, held_out: bool) -> Talk:
        return Talk(index, self._poisoned)

    def describe(self) -> str:
        return "talks"
