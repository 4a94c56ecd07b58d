"""Environments by the name in `run.environment`.

A name of ours, or `path/to/file.py:Class` or `module:Class` of yours: the class, or a function, is
called with `run.environment_settings` as keywords. What it makes has the methods of `base.py`, or
those of another project (`adapters/forms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from actors.chat import read_prompt, text_of
from configs.errors import NyalaError, SettingsError
from configs.own_code import explain, load_own
from configs.settings import RunSettings

from .adapters.forms import adapt
from .base import Conversation, Environment
from .calls import EnvironmentSource, call, finish
from .dataset.environment import Dataset

T = TypeVar("T")

CALL_S = 60.0  # of one call while the environment is tried

PARTS = ("prompt", "answer", "demonstration", "step", "score")

OURS = {
    "reasoning_gym": "actors.environments.reasoning_gym:ReasoningGym",
    "dataset": "actors.environments.dataset.environment:Dataset",
    "calculator": "actors.environments.calculator:Calculator",
}


@contextmanager
def naming(run: RunSettings) -> Iterator[None]:
    """Put the name of the environment before an error, where a run has several.

    Args:
        run: One of `RunSettings.by_environment`.
    """
    try:
        yield
    except NyalaError as error:
        if not run.environments:
            raise
        raise type(error)(f"{run.environments[0].title}: {error}") from error


def make_environment(run: RunSettings) -> Environment:
    """Make the environment of a run that has one.

    Slow at times (reasoning-gym imports for seconds) and endless with some settings: call it under
    a deadline.

    Raises:
        SettingsError: The environment is unknown, refuses its settings, or fails.
    """
    return _made(run, adapt)


def make_dataset(run: RunSettings) -> Dataset:
    """Make the rows of a run with the environment `dataset`, without a class that plays them.

    Raises:
        SettingsError: They are refused.
    """
    dataset: Dataset = _made(run, lambda made, *_: made)
    return dataset


def _made(run: RunSettings, adapted: Callable[[Any, RunSettings, Callable[[], Any]], T]) -> T:
    factory = _load_factory(run.environment)
    make = partial(factory, **run.environment_settings)
    try:
        return adapted(make(), run, make)
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


def check_environment(run: RunSettings) -> Conversation:
    """Make the environment and both a training and a held-out item; return the former.

    Raises:
        SettingsError: The environment cannot serve this run.
    """
    return try_environment(run)[0]


def try_environment(run: RunSettings) -> tuple[Conversation, EnvironmentSource]:
    """Check the environment, and return a training item with where more of it come from.

    One that is only evaluated gives a held-out item.

    Raises:
        SettingsError: The environment cannot serve this run.
    """
    environment = make_environment(run)
    try:
        sample = finish(_begin(environment, run, held_out=not run.is_trained))
        _check_complete(sample, run)
        again = finish(_begin(environment, run, held_out=not run.is_trained))
        _check_repeated(sample, again, run)
        if run.eval_episodes:
            finish(_begin(environment, run, held_out=True))
    except NyalaError:
        raise
    except Exception as error:
        raise SettingsError(
            f"run.environment must begin an item, got {run.environment!r}; {explain(error)}"
        ) from error
    another = getattr(environment, "another", lambda: make_environment(run))
    source = EnvironmentSource.of(environment, sample, another)
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
    conversation = await _begin(environment, run, held_out=not run.is_trained)
    demonstration = [turn.text for turn in conversation.demonstration if turn.trained]
    for turn in (demonstration, [conversation.answer or ""], [""])[way]:
        if (await call(conversation.step, turn, limit_s=CALL_S)).done:
            return set((await call(conversation.score, limit_s=CALL_S)).parts)
    return set()


async def _begin(environment: Environment, run: RunSettings, *, held_out: bool) -> Conversation:
    return await call(environment.begin, 0, run.seed, held_out=held_out, limit_s=CALL_S)


def _check_complete(sample: Conversation, run: RunSettings) -> None:
    missing = [name for name in PARTS if not hasattr(sample, name)]
    if missing:
        raise SettingsError(
            f"an item of run.environment must have {', '.join(PARTS)}, got from {run.environment} "
            f"a {type(sample).__name__} without {', '.join(missing)}; see docs/environments.md"
        )


def _check_repeated(sample: Conversation, again: Conversation, run: RunSettings) -> None:
    prompt, other = read_prompt(sample.prompt), read_prompt(again.prompt)
    if prompt != other:
        raise SettingsError(
            f"run.environment must begin the same item with the same prompt, got from "
            f"{run.environment} {text_of(prompt)!r:.60} and then {text_of(other)!r:.60}; an item "
            f"may depend on its index, or on the seed that reset gets, and on nothing else"
        )


def _first(environment: Environment, make: Callable[[], Environment]) -> Callable[[], Environment]:
    """Return what was made before more is made."""
    made = [environment]

    def next_one() -> Environment:
        try:
            return made.pop()
        except IndexError:
            return make()

    return next_one


def _load_factory(name: str) -> Callable[..., Any]:
    if ":" not in name and name not in OURS:
        known = ", ".join(sorted(OURS))
        raise SettingsError(
            f"run.environment must be one of {known}, or path/to/file.py:Class or module:Class, "
            f"got {name!r}"
        )
    factory: Callable[..., Any] = load_own(
        OURS.get(name, name), setting="run.environment", kind="class"
    )
    return factory
