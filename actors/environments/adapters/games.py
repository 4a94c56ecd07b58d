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

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.chat import GivenPrompt
from configs.errors import SettingsError

SUCCESS = ("is_success", "success")
"""Keys of `info` that say whether the episode was won, as stable-baselines names them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer of a game to a text."""

    observation: GivenPrompt
    """Empty when done."""
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Game(Protocol):
    """One environment of another project, which plays one episode at a time."""

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:
        """Begin an episode; return what the policy is asked, and `info`."""
        ...

    def play(self, text: str) -> Turn:
        """Take a turn of the policy."""
        ...


class GymGame:
    """A game with gymnasium's or gym's methods."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:
        """Reset by the seed."""
        if _takes(self._environment.reset, "seed"):
            found = self._environment.reset(seed=seed)
        else:
            if callable(getattr(self._environment, "seed", None)):  # gym before 0.26
                self._environment.seed(seed)
            found = self._environment.reset()
        is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
        observation, info = found if is_pair else (found, {})
        return _text(observation, "reset"), info

    def play(self, text: str) -> Turn:
        """Step."""
        match self._environment.step(text):
            case (observation, reward, terminated, truncated, Mapping() as info):
                done = bool(terminated or truncated)
            case (observation, reward, finished, Mapping() as info):
                done = bool(finished)
            case other:
                raise SettingsError(
                    "step must return (observation, reward, terminated, truncated, info) or "
                    f"(observation, reward, done, info), as gymnasium's does, got {other!r:.80}; a "
                    "class whose methods are tools is named as factory of `environment: dataset`"
                )
        return Turn("" if done else _text(observation, "step"), float(reward), done, info)


class ArenaGame:
    """A game of TextArena for one player."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._heard = ""

    def start(self, seed: int) -> tuple[GivenPrompt, Mapping[str, Any]]:
        """Reset by the seed."""
        self._environment.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def play(self, text: str) -> Turn:
        """Step; the reward comes with the end."""
        done, info = self._environment.step(text)
        if not done:
            return Turn(self._observation(), 0.0, done=False, info=info or {})
        rewards, _ = self._environment.close()
        return Turn("", float((rewards or {}).get(0, 0.0)), done=True, info=info or {})

    def _observation(self) -> str:
        player, observation = self._environment.get_observation()
        if player != 0:
            raise SettingsError(
                f"a game of TextArena must be for one player, got the turn of player {player}; let "
                f"a class of your own play the others in its step"
            )
        text = _text(observation, "get_observation")
        # Its wrappers repeat all that was said before; the policy has that in its context.
        new = text.removeprefix(self._heard)
        self._heard = text
        return new or text


class RowGame:
    """A game of skyrl-gym, which is made for one question."""

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
        found, info = self._environment.init(messages)
        return found, info or {}

    def play(self, text: str) -> Turn:
        """Step."""
        found = self._environment.step(text)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= found.keys():
            raise SettingsError(
                f"step must return observations, reward and done, as skyrl-gym's does, got "
                f"{found!r:.80}"
            )
        done = bool(found["done"])
        if not done and not found["observations"]:
            raise SettingsError("step must return an observation before the episode is done")
        observations = "" if done else found["observations"]
        return Turn(observations, float(found["reward"]), done, found.get("metadata") or {})


def is_arena(environment: Any) -> bool:
    """Return whether something with `reset` and `step` is a game of TextArena."""
    return hasattr(environment, "get_observation") and _takes(environment.reset, "num_players")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _text(observation: Any, method: str) -> str:
    if not isinstance(observation, str):
        raise SettingsError(
            f"an observation must be a text, got {type(observation).__name__} from {method}; "
            f"describe it in words, in {method} itself or in a wrapper"
        )
    return str(observation)
