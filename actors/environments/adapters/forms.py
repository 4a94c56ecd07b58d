"""The form of an environment, by the methods of what was made, and what adapts it.

begin, describe             ours
reset, step                 gymnasium, gym, TextArena
reset, tools                TRL's environment_factory, alone or as `factory` of a dataset
init, step                  skyrl-gym, as `factory` of a dataset

Called by `actors/environments/registry.py`, and in environment hosts by `hosted/serving.py`; so the
modules of this folder import no package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from actors.environments.base import Environment
from configs.errors import SettingsError

from .games import ArenaGame, GameEnvironment, GymGame, is_arena
from .row_environment import NoRows, RowGameEnvironment, ToolEnvironment

FORMS = (
    "begin and describe, or reset and step (gymnasium, TextArena), or reset and methods that are "
    "tools (TRL)"
)
FACTORY = "run.environment_settings.factory"


def adapt(first: Any, make: Callable[[], Any], *, name: str, needs_reward: bool) -> Environment:
    """Return an environment for the objects of the user's class.

    Args:
        first: The first object.
        make: Makes further ones.
        name: Name of the class, as in `run.environment`.
        needs_reward: The class must give the reward, because nothing else does.

    Raises:
        SettingsError: The object is of no known form.
    """
    if hasattr(first, "begin") and hasattr(first, "describe"):
        environment: Environment = first
        return environment
    if hasattr(first, "reset") and hasattr(first, "step"):
        return _game_environment(first, make, name)
    if hasattr(first, "init") and hasattr(first, "step"):
        raise SettingsError(
            f"run.environment must be dataset for a class with `init` and step, got "
            f"{name}; name the class as factory in run.environment_settings, beside path"
        )
    if hasattr(first, "reset"):
        return ToolEnvironment(NoRows(), make, setting="run.environment", needs_reward=needs_reward)
    raise SettingsError(
        f"run.environment must be a class with {FORMS}, got {name!r}, which makes a "
        f"{type(first).__name__}; write these methods (docs/environments.md, docs/adapters.md)"
    )


def over_rows(
    rows: Environment, cls: Callable[..., Any], settings: Mapping[str, Any], *, needs_reward: bool
) -> Environment:
    """Return an environment of rows that a class plays.

    Args:
        rows: The dataset of questions.
        cls: The user's class.
        settings: Keywords of a class with tools; a class with `init` and `step` gets them as
            `env_config`.
        needs_reward: A class with tools must give the reward, because nothing else does.

    Raises:
        SettingsError: The class has neither `init` and `step` nor tools, or gives no reward.
    """
    if hasattr(cls, "init") and hasattr(cls, "step"):
        return RowGameEnvironment(rows, cls, settings)
    make = partial(cls, **settings)
    return ToolEnvironment(rows, make, setting=FACTORY, needs_reward=needs_reward)


def _game_environment(first: Any, make: Callable[[], Any], name: str) -> GameEnvironment:
    if is_arena(first):
        # TextArena's wrappers keep their texts through a reset, and some load long word lists.
        return GameEnvironment(name, lambda: ArenaGame(copy.deepcopy(first)), is_reusable=False)
    return GameEnvironment(name, lambda: GymGame(make()), is_reusable=True)
