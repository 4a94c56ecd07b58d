"""Environments by the name in `run.environment`.

A name of ours, or `path/to/file.py:Class` or `module:Class` of yours: the class is called with
`run.environment_settings` as keywords and must have `begin` and `describe` (`base.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from pydantic import ValidationError

from configs.errors import NyalaError, SettingsError
from configs.own_code import explain, load_own
from configs.settings import RunSettings

from .base import Conversation, Environment
from .calls import EnvironmentSource, call, finish

CALL_S = 60.0  # of one call while the environment is tried

OURS = {
    "reasoning_gym": "actors.environments.reasoning_gym:ReasoningGym",
    "dataset": "actors.environments.dataset.environment:Dataset",
    "calculator": "actors.environments.calculator:Calculator",
}


def make_environment(run: RunSettings) -> Environment:
    """Make the environment of a run.

    Slow at times (reasoning-gym imports for seconds) and endless with some settings: call it under
    a deadline.

    Raises:
        SettingsError: The environment is unknown, refuses its settings, or fails.
    """
    factory = _load_class(run.environment)
    try:
        environment: Environment = factory(**run.environment_settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SettingsError(
            f"run.environment_settings.{key} must be valid for {run.environment}, "
            f"got {first['input']!r}; {first['msg']}"
        ) from error
    except TypeError as error:
        raise SettingsError(
            f"run.environment_settings must be keywords of {run.environment}, "
            f"got {run.environment_settings}; it says: {error}"
        ) from error
    except NyalaError:
        raise
    except Exception as error:
        raise SettingsError(
            f"run.environment must be made by {run.environment}, got {explain(error)}"
        ) from error
    return environment


def check_environment(run: RunSettings) -> Conversation:
    """Make the environment and both a training and a held-out item; return the former.

    Raises:
        SettingsError: The environment cannot serve this run.
    """
    return try_environment(run)[0]


def try_environment(run: RunSettings) -> tuple[Conversation, EnvironmentSource]:
    """Check the environment, and return a training item with where more of it come from.

    Raises:
        SettingsError: The environment cannot serve this run.
    """
    environment = make_environment(run)
    try:
        sample = finish(_begin(environment, run, held_out=False))
        if run.eval_episodes:
            finish(_begin(environment, run, held_out=True))
    except NyalaError:
        raise
    except Exception as error:
        raise SettingsError(
            f"run.environment must begin an item, got {run.environment!r}; {explain(error)}"
        ) from error
    source = EnvironmentSource.of(environment, sample, lambda: make_environment(run))
    if not source.is_async:  # what was opened in one event loop is of no use in another
        source = replace(source, make=_first(environment, source.make))
    return sample, source


def example_parts(run: RunSettings) -> set[str]:
    """Name the parts of the reward that ways through the first item get: right ones and a silent.

    Other episodes may have more: what never ends here is not judged.
    """
    environment = make_environment(run)
    names: set[str] = set()
    for way in range(3):
        names |= finish(_parts(environment, run, way))
    return names


async def _parts(environment: Environment, run: RunSettings, way: int) -> set[str]:
    conversation = await _begin(environment, run, held_out=False)
    demonstration = [turn.text for turn in conversation.demonstration if turn.trained]
    for turn in (demonstration, [conversation.answer or ""], [""])[way]:
        if (await call(conversation.step, turn, limit_s=CALL_S)).done:
            return set((await call(conversation.score, limit_s=CALL_S)).parts)
    return set()


async def _begin(environment: Environment, run: RunSettings, *, held_out: bool) -> Conversation:
    return await call(environment.begin, 0, run.seed, held_out=held_out, limit_s=CALL_S)


def _first(environment: Environment, make: Callable[[], Environment]) -> Callable[[], Environment]:
    """Return what was made before more is made."""
    made = [environment]

    def next_one() -> Environment:
        try:
            return made.pop()
        except IndexError:
            return make()

    return next_one


def _load_class(name: str) -> type[Environment]:
    if ":" not in name and name not in OURS:
        known = ", ".join(sorted(OURS))
        raise SettingsError(
            f"run.environment must be one of {known}, or path/to/file.py:Class or module:Class, "
            f"got {name!r}"
        )
    found = load_own(OURS.get(name, name), setting="run.environment", kind="class")
    if not (hasattr(found, "begin") and hasattr(found, "describe")):
        raise SettingsError(
            f"run.environment must be a class with begin and describe, got {name!r}; "
            "see actors/environments/base.py"
        )
    return cast("type[Environment]", found)  # its methods have just been seen
