"""Rows of a dataset, each of them a question to a class written for TRL or for skyrl-gym.

    run:
      environment: dataset
      environment_settings: {path: questions.jsonl, prompt: question, factory: env.py:Notes}

TRL's classes are made once for each episode under way and reset with the columns of the row;
skyrl-gym's are made anew for each row. Without a dataset, TRL's `reset` returns the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from actors.chat import GivenPrompt, read_prompt, text_of
from actors.environments.base import Conversation, Environment, Score, Segment, Step, columns_of
from configs.errors import SettingsError

from .games import Game, GameConversation, RowGame, item_seed
from .tools import AsyncToolConversation, ToolConversation, Tools


class ToolEnvironment:
    """Items of a dataset for a class with tools."""

    def __init__(
        self, rows: Environment, make: Callable[[], Any], *, setting: str, needs_reward: bool
    ) -> None:
        """Prepare.

        Args:
            rows: The dataset of questions.
            make: Makes an instance of the class.
            setting: Setting that names the class, for errors.
            needs_reward: The class must give the reward, because nothing else does.

        Raises:
            SettingsError: The class has no tools, or no reward.
        """
        first = make()
        self._rows = rows
        self._make = make
        self._setting = setting
        self._needs_reward = needs_reward
        self._free = [first]
        self._tools = Tools.from_instance(first, setting=setting)
        if needs_reward and not self._tools.has_reward:
            raise SettingsError(
                f"{setting} must have get_reward where nothing else gives a reward, got "
                f"{type(first).__name__} without one; add it, or set run.reward"
            )

    def begin(self, index: int, seed: int, *, held_out: bool) -> ToolConversation:
        """Begin the episode of an item; members of a group have the same question.

        Raises:
            SettingsError: The prompt is empty: neither the row nor `reset` has a question.
        """
        row = self._rows.begin(index, seed, held_out=held_out)
        instance = self._free.pop() if self._free else self._make()
        kind = AsyncToolConversation if self._tools.is_async else ToolConversation
        leave = partial(self._free.append, instance)
        begun = kind(instance, self._tools, row, item_seed(index, held_out=held_out), leave)
        if not text_of(read_prompt(begun.prompt)):
            raise SettingsError(
                f"{self._setting} must have a reset that returns the question where no dataset has "
                "one, got an empty prompt; return the question from reset, or set run.environment: "
                "dataset and name the class as run.environment_settings.factory"
            )
        return begun

    def describe(self) -> str:
        """Return the description of the rows; the hash of a run has the code of the class."""
        return f"tools over {self._rows.describe()}"

    def another(self) -> ToolEnvironment:
        """Return an environment for another thread, with the same rows and its own instances."""
        return ToolEnvironment(
            self._rows, self._make, setting=self._setting, needs_reward=self._needs_reward
        )


class RowGameEnvironment:
    """Items of a dataset for a class of skyrl-gym."""

    def __init__(
        self, rows: Environment, make: Callable[..., Any], settings: Mapping[str, Any]
    ) -> None:
        self._rows = rows
        self._make = make
        self._settings = settings

    def begin(self, index: int, seed: int, *, held_out: bool) -> GameConversation:
        """Begin the episode of an item; members of a group have the same question."""
        row = self._rows.begin(index, seed, held_out=held_out)
        columns = columns_of(row)
        instance = self._make(env_config=SimpleNamespace(**self._settings), extras=columns)
        game = RowGame(instance, row.prompt)
        conversation = GameConversation(game, item_seed(index, held_out=held_out), leave=_keep_none)
        conversation.columns = columns | conversation.columns
        conversation.answer = row.answer
        return conversation

    def describe(self) -> str:
        """Return the description of the rows; the hash of a run has the code of the class."""
        return f"games over {self._rows.describe()}"

    def another(self) -> RowGameEnvironment:
        """Return an environment for another thread, with the same rows."""
        return RowGameEnvironment(self._rows, self._make, self._settings)


class NoRow:
    """A question that the class itself asks: its `reset` returns it."""

    prompt: GivenPrompt = ({"role": "user", "content": ""},)
    answer: str | None = None
    demonstration: tuple[Segment, ...] = ()

    def step(self, text: str) -> Step:  # noqa: ARG002 - the class judges
        """Take the text of a turn."""
        return Step()

    def score(self) -> Score:
        """Return a score of 0: the class or a reward function judges."""
        return Score(0.0)


class NoRows:
    """The rows of a class that has no dataset."""

    is_thread_safe = True

    def begin(self, index: int, seed: int, *, held_out: bool) -> Conversation:  # noqa: ARG002 - all are alike
        """Return an empty question."""
        return NoRow()

    def describe(self) -> str:
        """Return a constant: there are no rows."""
        return "no rows"


def _keep_none(game: Game) -> None:
    """Drop a game of skyrl-gym, which is for one row."""
