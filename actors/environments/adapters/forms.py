"""The form of an environment, by the methods of what was made, and what adapts it.

begin, describe             ours
reset, step                 gymnasium, gym, TextArena
reset, tools                TRL's environment_factory, alone or as `factory` of a dataset
init, step                  skyrl-gym, as `factory` of a dataset
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from actors.environments.base import Environment
from actors.environments.dataset.environment import Dataset
from configs.errors import SettingsError
from configs.own_code import load_own
from configs.settings import RunSettings

from .game_environment import GameEnvironment
from .games import ArenaGame, GymGame, is_arena
from .row_environment import NoRows, RowGameEnvironment, ToolEnvironment

FORMS = (
    "begin and describe, or reset and step (gymnasium, TextArena), or reset and methods that are "
    "tools (TRL)"
)
FACTORY = "run.environment_settings.factory"


def adapt(made: Any, run: RunSettings, make: Callable[[], Any]) -> Environment:
    """Return an environment for what `make` has made.

    Raises:
        SettingsError: It is of no known form.
    """
    if isinstance(made, Dataset):
        return made if made.factory is None else _over_rows(made, made.factory, run)
    if hasattr(made, "begin") and hasattr(made, "describe"):
        environment: Environment = made
        return environment
    if hasattr(made, "reset") and hasattr(made, "step"):
        return _of_games(made, run, make)
    if hasattr(made, "init") and hasattr(made, "step"):
        raise SettingsError(
            f"run.environment must be dataset for a class that is asked by `init`, got "
            f"{run.environment}; name it as factory in run.environment_settings, beside path"
        )
    if hasattr(made, "reset"):
        return ToolEnvironment(
            NoRows(), make, setting="run.environment", needs_reward=run.reward is None
        )
    raise SettingsError(
        f"run.environment must be a class with {FORMS}, got {run.environment!r}, which makes a "
        f"{type(made).__name__}; docs/environments.md and docs/adapters.md show them"
    )


def _of_games(made: Any, run: RunSettings, make: Callable[[], Any]) -> GameEnvironment:
    if is_arena(made):
        # TextArena's wrappers keep what was said through a reset, and some load long word lists.
        return GameEnvironment(
            run.environment, lambda: ArenaGame(copy.deepcopy(made)), is_reusable=False
        )
    return GameEnvironment(run.environment, lambda: GymGame(make()), is_reusable=True)


def _over_rows(rows: Dataset, factory: str, run: RunSettings) -> Environment:
    own = load_own(factory, setting=FACTORY, kind="class")
    if hasattr(own, "init") and hasattr(own, "step"):
        return RowGameEnvironment(rows, own, rows.factory_settings)
    needs_reward = run.reward is None and not rows.has_answers
    make = partial(own, **rows.factory_settings)
    return ToolEnvironment(rows, make, setting=FACTORY, needs_reward=needs_reward)
