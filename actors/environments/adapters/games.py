"""Text environments of other projects behind one interface: begin with a seed, play a turn.

    gymnasium, gym    reset(seed=...) -> observation or (observation, info)
                      step(text) -> (observation, reward, terminated, truncated, info)
                                 or (observation, reward, done, info)
    TextArena         reset(num_players=1, seed=...), get_observation() -> (player, text),
                      step(text) -> (done, info), close() -> (rewards, info)
    skyrl-gym         init(prompt) -> (messages, info), step(text) -> a dict

They are recognised by their methods; none of these packages is imported here.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from actors.chat import GivenPrompt
from actors.environments.base import Score, Segment, Step
from configs.errors import SettingsError, quoted

# --------------------------------------------------------------------------------------------------
# The generators that a process shares, `random`'s and numpy's, as one episode sees them.
#
# Many games draw their secrets with `random.choice`. Here each episode has its own state of these
# generators, which begins with the seed of its item. So the item is the same on every actor, and
# the same texts have the same answers, although episodes take turns and threads share the process.

NUMPY: Any = import_module("numpy.random") if find_spec("numpy") else None
"""An environment host may have none."""

LOCK = threading.RLock()  # all threads share the generators


class _GeneratorState(NamedTuple):
    """State of the generators that the modules `random` and `numpy.random` share."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> _GeneratorState:
        return cls(random.getstate(), NUMPY and NUMPY.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        if NUMPY:
            NUMPY.set_state(self.numpy)

    def equals(self, other: _GeneratorState) -> bool:
        if self.python != other.python or not NUMPY:
            return bool(self.python == other.python)
        _, keys, *place = self.numpy
        _, other_keys, *other_place = other.numpy
        return place == other_place and bool((keys == other_keys).all())


class SharedGenerators:
    """The state of the shared generators for one episode.

    The state is kept only if the first call of the episode draws from the generators. Otherwise
    later calls of the episode do not wait for those of other episodes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: _GeneratorState | None = None
        self._is_used = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Carry out a call of the episode with its own state.

        As long as the state is kept, such calls of all episodes of this process take turns.
        """
        if not self._is_used:
            yield
            return
        with LOCK:
            outside = _GeneratorState.now()
            before = self._begin()
            try:
                yield
            finally:
                after = _GeneratorState.now()
                outside.restore()
                self._is_used = self._state is not None or not after.equals(before)
                self._state = after

    def _begin(self) -> _GeneratorState:
        if self._state is None:
            random.seed(self._seed)
            if NUMPY:
                NUMPY.seed(self._seed)
        else:
            self._state.restore()
        return _GeneratorState.now()


# --------------------------------------------------------------------------------------------------
# Text environments of other projects behind one interface: begin with a seed, play a turn.

SUCCESS = ("is_success", "success")
"""Keys of `info` that say whether the episode was won, as stable-baselines names them."""


@dataclass(frozen=True, slots=True)
class GameStep:
    """Answer of a game to a text."""

    observation: GivenPrompt
    """Empty when done."""
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Game(Protocol):
    """One environment of another project, which plays one episode at a time."""

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:
        """Begin an episode; return the prompt of the policy, and `info`.

        Raises:
            SettingsError: The other project's method returns what cannot be used.
        """
        ...

    def play(self, text: str) -> GameStep:
        """Take a turn of the policy; raises as `start`."""
        ...


class GymGame:
    """A game with gymnasium's or gym's methods."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:
        """Reset the environment with the seed."""
        if _has_parameter(self._environment.reset, "seed"):
            result = self._environment.reset(seed=seed)
        else:
            if callable(getattr(self._environment, "seed", None)):  # gym before 0.26
                self._environment.seed(seed)
            result = self._environment.reset()
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        observation, info = result if is_pair else (result, {})
        return _text(observation, "reset"), info

    def play(self, text: str) -> GameStep:
        """Step the environment with a text; raises as `Game.play`."""
        match self._environment.step(text):
            case (observation, reward, terminated, truncated, Mapping() as info):
                done = bool(terminated or truncated)
            case (observation, reward, finished, Mapping() as info):
                done = bool(finished)
            case other:
                raise SettingsError(
                    "step must return (observation, reward, terminated, truncated, info) or "
                    f"(observation, reward, done, info), as gymnasium's does, got "
                    f"{quoted(other)}; return one of these, or, where step is a tool of the "
                    "policy, set run.environment: dataset and name the class as "
                    "run.environment_settings.factory"
                )
        return GameStep("" if done else _text(observation, "step"), float(reward), done, info)


class ArenaGame:
    """A game of TextArena for one player."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._heard = ""

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:
        """Reset the game with the seed."""
        self._environment.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def play(self, text: str) -> GameStep:
        """Step the game with a text; the reward comes at the end."""
        done, info = self._environment.step(text)
        if not done:
            return GameStep(self._observation(), 0.0, done=False, info=info or {})
        rewards, _ = self._environment.close()
        return GameStep("", float((rewards or {}).get(0, 0.0)), done=True, info=info or {})

    def _observation(self) -> str:
        player, observation = self._environment.get_observation()
        if player != 0:
            raise SettingsError(
                f"a game of TextArena must be for one player, got the turn of player {player}; let "
                f"a class of your own play the others in its step"
            )
        text = _text(observation, "get_observation")
        # TextArena's wrappers repeat all earlier texts, which the policy has in its context.
        new = text.removeprefix(self._heard)
        self._heard = text
        return new or text


class RowGame:
    """A game of skyrl-gym for one question."""

    def __init__(self, environment: Any, prompt: GivenPrompt) -> None:
        self._environment = environment
        self._prompt = prompt

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:  # noqa: ARG002 - it is made by its row
        """Begin with the prompt of its row."""
        messages = (
            [{"role": "user", "content": self._prompt}]
            if isinstance(self._prompt, str)
            else list(self._prompt)
        )
        prompt, info = self._environment.init(messages)
        return prompt, info or {}

    def play(self, text: str) -> GameStep:
        """Step the game with a text; raises as `Game.play`."""
        step = self._environment.step(text)
        if not isinstance(step, Mapping) or not {"observations", "reward", "done"} <= step.keys():
            raise SettingsError(
                "step must return observations, reward and done, as skyrl-gym's does, got "
                f"{quoted(step)}; change what its step returns"
            )
        done = bool(step["done"])
        if not done and not step["observations"]:
            raise SettingsError(
                "step must return an observation until the episode is done, got none; return one, "
                "or end the episode with done"
            )
        observations = "" if done else step["observations"]
        return GameStep(observations, float(step["reward"]), done, step.get("metadata") or {})


def is_arena(environment: Any) -> bool:
    """Return whether an object with `reset` and `step` is a game of TextArena."""
    return hasattr(environment, "get_observation") and _has_parameter(
        environment.reset, "num_players"
    )


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _text(observation: Any, method: str) -> str:
    if not isinstance(observation, str):
        raise SettingsError(
            f"an observation must be a text, got {type(observation).__name__} from {method}; "
            f"describe it in words, in {method} itself or in a wrapper"
        )
    return str(observation)


# --------------------------------------------------------------------------------------------------
# Games of other projects as an environment: the seed of an item makes its episode.
#
# The reward of an episode is the sum of the rewards of its turns. Evaluations report `is_success`
# of `info` as accuracy, or the reward itself where `info` has no such key.

NUMPY_BOOLS = ("bool_", "bool")  # before numpy 2, and since
SEEDS = 1 << 30  # on each side of the split


class GameConversation:
    """One episode of a game."""

    answer: str | None = None
    demonstration: tuple[Segment, ...] = ()

    def __init__(self, game: Game, seed: int, *, leave: Callable[[Game], object]) -> None:
        """Begin.

        Args:
            game: The game; no other episode uses it at the same time.
            seed: Seed of the item.
            leave: Takes the game back when the episode is over.

        Raises:
            SettingsError: The game begins without a text, or as `Game.start`.
        """
        self._game = game
        self._leave = leave
        self._generators = SharedGenerators(seed)
        with self._generators.kept():
            self.prompt, info = game.start(seed)
        if not self.prompt:
            raise SettingsError(
                "the first observation must be the question to the policy, got an empty text; "
                "return the question from reset (init in a class of skyrl-gym)"
            )
        self.columns = {key: value for key, value in info.items() if _is_plain(value)}
        self._reward = 0.0
        self._success: float | None = None

    def step(self, text: str) -> Step:
        """Play a turn of the game, and add its reward; raises as `Game.play`."""
        with self._generators.kept():
            turn = self._game.play(text)
        self._reward += turn.reward
        for key in SUCCESS:
            won: Any = turn.info.get(key)
            if isinstance(won, int | float) or type(won).__name__ in NUMPY_BOOLS:
                self._success = float(won)
        return Step(turn.observation, turn.done)

    def score(self) -> Score:
        """Return the sum of the rewards, with `exact` where `info` said whether it was won.

        The game may begin another episode from then on.
        """
        self._leave(self._game)
        parts = {} if self._success is None else {"exact": self._success}
        return Score(self._reward, parts)


class GameEnvironment:
    """Environment of a game: the number of an item gives the seed of its episode.

    Held-out items have seeds of their own.
    """

    def __init__(self, name: str, make: Callable[[], Game], *, is_reusable: bool) -> None:
        """Prepare.

        Args:
            name: Name of the environment.
            make: Makes a game; each unfinished episode has its own.
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
        """Return the name of the environment; the hash of a run has its code and settings."""
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
