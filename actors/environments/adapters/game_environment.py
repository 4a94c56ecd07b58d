"""Games of other projects as an environment: the seed of an item makes its episode.

The reward of an episode is the sum of the rewards of its turns. Where `info` says `is_success`,
that is what evaluations report as accuracy, otherwise the reward itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from actors.environments.base import Score, Segment, Step
from configs.errors import SettingsError

from .games import SUCCESS, Game
from .shared_generators import SharedGenerators

NUMPY_BOOLS = ("bool_", "bool")  # before numpy 2, and since
SEEDS = 1 << 30  # on each side of the split


class GameConversation:
    """One episode of a game."""

    answer: str | None = None
    demonstration: tuple[Segment, ...] = ()

    def __init__(self, game: Game, seed: int, *, leave: Callable[[Game], object]) -> None:
        """Begin.

        Args:
            game: Plays nothing else meanwhile.
            seed: Of the item.
            leave: Takes the game back when the episode is over.
        """
        self._game = game
        self._leave = leave
        self._generators = SharedGenerators(seed)
        with self._generators.kept():
            self.prompt, info = game.start(seed)
        if not self.prompt:
            raise SettingsError(
                "the first observation must be what the policy is asked, got an empty text; "
                "let reset return it"
            )
        self.columns = {key: value for key, value in info.items() if _is_plain(value)}
        self._reward = 0.0
        self._success: float | None = None

    def step(self, text: str) -> Step:
        """Play a turn."""
        with self._generators.kept():
            turn = self._game.play(text)
        self._reward += turn.reward
        for key in SUCCESS:
            won: Any = turn.info.get(key)
            if isinstance(won, int | float) or type(won).__name__ in NUMPY_BOOLS:
                self._success = float(won)
        return Step(turn.observation, turn.done)

    def score(self) -> Score:
        """Return the sum of the rewards."""
        self._leave(self._game)
        parts = {} if self._success is None else {"exact": self._success}
        return Score(self._reward, parts)


class GameEnvironment:
    """Items by the seed that their number gives; held-out items have seeds of their own."""

    def __init__(self, name: str, make: Callable[[], Game], *, is_reusable: bool) -> None:
        """Prepare.

        Args:
            name: Of the environment.
            make: Makes a game: each episode under way has its own.
            is_reusable: A game can play another episode after one.
        """
        self._name = name
        self._make = make
        self._is_reusable = is_reusable
        self._free: list[Game] = []

    def begin(self, index: int, seed: int, *, held_out: bool) -> GameConversation:  # noqa: ARG002 - an item is its index
        """Begin the episode of an item; members of a group play the same, whatever their seeds."""
        game = self._free.pop() if self._free else self._make()
        return GameConversation(game, item_seed(index, held_out=held_out), leave=self._leave)

    def describe(self) -> str:
        """Return its name; the hash of a run has its code and settings."""
        return f"games of {self._name}"

    def _leave(self, game: Game) -> None:
        if self._is_reusable:
            self._free.append(game)


def item_seed(index: int, *, held_out: bool) -> int:
    """Return the seed of an item; those of training are even, held-out ones odd."""
    digest = hashlib.blake2b(f"{index} {held_out}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEEDS * 2 + held_out


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)
