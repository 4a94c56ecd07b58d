"""Environments by the name in `run.environment`: making, checking and trying them.

A name is one of Nyala's own, or `path/to/file.py:Class` or `module:Class` of the user. The class,
or a function, is called with `run.environment_settings` as keywords. The object that it makes has
the methods of `base.py`, or those of another project (`adapters/forms.py`). An actor makes and
tries them when it starts; `nyala up`, `nyala doctor` and `nyala env` check them and show examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from actors.chat import Prompt, read_prompt, text_of
from configs.errors import DeadlineError, NyalaError, SettingsError, quoted
from configs.settings import RunSettings
from configs.user_code import explain, load_user_code
from configs.user_python import UserPython, installed_python, requirements_of
from configs.worker import Worker

from .adapters.forms import FACTORY, adapt, over_rows
from .agent import Agent
from .base import Conversation, Environment, Score, tools_of
from .calls import EnvironmentSource, call, finish
from .dataset.environment import Dataset
from .hosted.environment import Host, HostedEnvironment, HostSettings

# --------------------------------------------------------------------------------------------------
# Foreign code under a deadline.
#
# A thread cannot be killed, but it can be left behind: a daemon thread does not keep the process
# from ending. That is enough for start-up checks (the process ends with an error) and, with a
# count, for items that hang.

T = TypeVar("T")


def call_within(timeout_s: float, function: Callable[[], T], *, what: str) -> T:
    """Return what `function` returns, or raise what it raises.

    Raises:
        DeadlineError: `function` did not end within `timeout_s`; its thread is left behind.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.set_exception(error)

    Worker(call, name=f"deadline-{what}").start().join(timeout_s)
    if not outcome.done():
        raise DeadlineError(
            f"{what} must end within {timeout_s:g} s, got no result; change "
            "run.environment_settings with which a generator searches for ever, or make a class of "
            "yours faster"
        )
    return outcome.result()


# --------------------------------------------------------------------------------------------------
# Environments by the name in `run.environment`.

CALL_S = 60.0  # of one call while the environment is tried

PARTS = ("prompt", "answer", "demonstration", "step", "score")

OURS = {
    "reasoning_gym": "actors.environments.reasoning_gym:ReasoningGym",
    "agent": "actors.environments.agent:Agent",
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


def for_each(run: RunSettings, work: Callable[[RunSettings], T], *, limit_s: float) -> Iterator[T]:
    """Do work on each environment of a run in turn, under a deadline; errors name the environment.

    Packages that an environment needs in a Python of its own are installed before, without this
    deadline.

    Args:
        run: Settings of the run, with one environment or several.
        work: Gets the run as if it had this environment alone.
        limit_s: Time limit of the work on one environment.

    Raises:
        DeadlineError: The work on an environment takes longer; its thread is left behind.
        SettingsError: The environment's Python cannot be found or made.
        NyalaError: As `work` raises it.
    """
    for alone in run.by_environment.values():
        with naming(alone):
            installed_python(UserPython.of_environment(alone))  # installs for as long as it takes
            result = call_within(limit_s, partial(work, alone), what="run.environment")
        yield result


def make_environment(run: RunSettings, *, workers: int = 1) -> Environment:
    """Make the environment of a run that has one.

    Slow at times (reasoning-gym imports for seconds) and endless with some settings: call it under
    a deadline.

    Args:
        run: Settings of the run, with one environment.
        workers: Threads in its host, where it has one.

    Raises:
        SettingsError: The environment is unknown, refuses its settings, or fails.
    """
    python = installed_python(UserPython.of_environment(run))
    return (
        _make_from_settings(run, _adapt_first)
        if python is None
        else _make_hosted(run, python, workers)
    )


def make_dataset(run: RunSettings) -> Dataset:
    """Make the rows of a run with the environment `dataset` or `agent`, without what plays them.

    Raises:
        SettingsError: The settings or the rows are refused.
    """
    environment: Dataset | Agent = _make_from_settings(run, lambda environment, *_: environment)
    return environment.rows if isinstance(environment, Agent) else environment


def _adapt_first(first: Any, run: RunSettings, make: Callable[[], Any]) -> Environment:
    if isinstance(first, Dataset) and first.factory is not None:
        factory = load_user_code(first.factory, setting=FACTORY, kind="class")
        needs_reward = run.reward is None and not first.has_answers
        return over_rows(first, factory, first.factory_settings, needs_reward=needs_reward)
    return adapt(first, make, name=run.environment, needs_reward=run.reward is None)


def _make_hosted(run: RunSettings, python: Path, workers: int) -> Environment:
    rows = make_dataset(run) if run.environment == "dataset" else None
    name = run.environment if rows is None else rows.factory
    if name is None or ":" not in name:
        raise SettingsError(
            f"run.environment_python and run.environment_requirements must be null and empty "
            f"unless run.environment is a class of yours, got {run.environment}; leave them out"
        )
    settings = HostSettings(
        python,
        requirements_of(UserPython.of_environment(run)),
        name,
        run.environment_settings if rows is None else rows.factory_settings,
        "run.environment" if rows is None else FACTORY,
        plays_rows=rows is not None,
        needs_reward=run.reward is None and not (rows is not None and rows.has_answers),
        threads=workers,
    )
    hosted: Any = HostedEnvironment(Host(settings), rows)  # its methods are awaited
    environment: Environment = hosted
    return environment


def _make_from_settings(
    run: RunSettings, adapt_made: Callable[[Any, RunSettings, Callable[[], Any]], T]
) -> T:
    factory = _load_factory(run.environment)
    make = partial(factory, **run.environment_settings)
    try:
        return adapt_made(make(), run, make)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SettingsError(
            f"run.environment_settings.{key} must be valid for {run.environment}, "
            f"got {first['input']!r} ({first['msg']}); correct or leave out that key"
        ) from error
    except TypeError as error:
        raise SettingsError(
            f"run.environment_settings must be keywords of {run.environment}, got "
            f"{run.environment_settings}, refused with: {error}; correct or leave out that key"
        ) from error
    except NyalaError:
        raise
    except Exception as error:
        raise SettingsError(
            f"run.environment must be made without an error, got from {run.environment}: "
            f"{explain(error)}; mend the class, or run.environment_settings"
        ) from error


def check_environment(run: RunSettings) -> Conversation:
    """Check the environment, and return the item of `try_environment`; raises as that does."""
    return try_environment(run)[0]


def try_environment(
    run: RunSettings, *, workers: int = 1
) -> tuple[Conversation, EnvironmentSource]:
    """Check the environment, and return a training item with the source of further environments.

    For an environment that is only evaluated the item is a held-out one. The item is made twice,
    to see that it is the same; a held-out item is made where the run has evaluations.

    Args:
        run: Settings of the run, with one environment.
        workers: Threads in its host, where it has one.

    Raises:
        SettingsError: The environment cannot serve this run.
        DeadlineError: An `async` method takes longer than 60 s.
    """
    environment = make_environment(run, workers=workers)
    try:
        sample = finish(_begin(environment, run, held_out=not run.is_trained))
        _check_complete(sample, run)
        again = finish(_begin(environment, run, held_out=not run.is_trained))
        _check_repeated(sample, again, run)
        if run.deterministic and not getattr(environment, "can_replay", True):
            raise SettingsError(
                f"run.environment must repeat its answers with run.deterministic, got "
                f"{run.environment}, whose can_replay is False; leave run.deterministic out"
            )
        if run.eval_episodes:
            finish(_begin(environment, run, held_out=True))
    except NyalaError:
        raise
    except Exception as error:
        raise SettingsError(
            f"run.environment must begin an item, got an error of {run.environment}: "
            f"{explain(error)}; mend the class, or run.environment_settings"
        ) from error
    another = getattr(environment, "another", lambda: make_environment(run))
    source = EnvironmentSource.from_environment(environment, sample, another)
    if not source.is_async:  # objects opened in one event loop cannot be used in another
        source = replace(source, make=_first(environment, source.make))
    return sample, source


def example_prompts(run: RunSettings, most: int, *, seconds: float) -> list[tuple[Prompt, str]]:
    """Return prompts of the first items, with the tools that the policy may call as JSON.

    Args:
        run: Settings of the run, with one environment.
        most: Most prompts to return.
        seconds: Time after which no further item is begun; one is always made.

    Raises:
        SettingsError: As `make_environment`, or a prompt is neither a text nor messages.
    """
    environment, until = make_environment(run), time.monotonic() + seconds
    prompts: list[tuple[Prompt, str]] = []
    while len(prompts) < most and (not prompts or time.monotonic() < until):
        begin = _begin(environment, run, held_out=not run.is_trained, index=len(prompts))
        item = finish(begin)
        prompts.append((read_prompt(item.prompt), tools_of(item)))
    return prompts


def example_scores(run: RunSettings) -> list[Score | None]:
    """Score three ways through the first item: its demonstration, its answer, and an empty turn.

    The score of a way that does not end the episode is None. Errors of the class come as they are.
    """
    environment = make_environment(run)
    return [
        finish(_score(environment, run, way))
        for way in (_demonstrated_turns, _answer_turn, _empty_turn)
    ]


def scores_of(run: RunSettings, ways: Iterable[Sequence[str]]) -> list[Score | None]:
    """Score other ways through the first item, each given by its turns; as `example_scores`."""
    environment = make_environment(run)
    return [finish(_score(environment, run, _fixed_turns(turns))) for turns in ways]


def _demonstrated_turns(conversation: Conversation) -> list[str]:
    return [turn.text for turn in conversation.demonstration if turn.trained]


def _answer_turn(conversation: Conversation) -> list[str]:
    return [conversation.answer or ""]


def _empty_turn(_: Conversation) -> list[str]:
    return [""]


def _fixed_turns(turns: Sequence[str]) -> Callable[[Conversation], Sequence[str]]:
    return lambda _: turns


async def _score(
    environment: Environment, run: RunSettings, way: Callable[[Conversation], Sequence[str]]
) -> Score | None:
    conversation = await _begin(environment, run, held_out=not run.is_trained)
    for turn in way(conversation):
        if (await call(conversation.step, turn, limit_s=CALL_S)).done:
            return await call(conversation.score, limit_s=CALL_S)
    return None


async def _begin(
    environment: Environment, run: RunSettings, *, held_out: bool, index: int = 0
) -> Conversation:
    return await call(environment.begin, index, run.seed, held_out=held_out, limit_s=CALL_S)


def _check_complete(sample: Conversation, run: RunSettings) -> None:
    missing = [name for name in PARTS if not hasattr(sample, name)]
    if missing:
        raise SettingsError(
            f"an item of run.environment must have {', '.join(PARTS)}, got from {run.environment} "
            f"a {type(sample).__name__} without {', '.join(missing)}; add what is missing, as "
            "docs/environments.md shows"
        )


def _check_repeated(sample: Conversation, again: Conversation, run: RunSettings) -> None:
    prompt, other = read_prompt(sample.prompt), read_prompt(again.prompt)
    if prompt != other:
        raise SettingsError(
            f"run.environment must begin the same item with the same prompt, got "
            f"{quoted(text_of(prompt), 60)} and then {quoted(text_of(other), 60)} from "
            f"{run.environment}; make an item depend on nothing but its index, or the seed that "
            f"reset gets"
        )


def _first(environment: Environment, make: Callable[[], Environment]) -> Callable[[], Environment]:
    """Return a function that returns `environment` at its first call, and new ones afterwards."""
    unused = [environment]

    def next_one() -> Environment:
        try:
            return unused.pop()
        except IndexError:
            return make()

    return next_one


def _load_factory(name: str) -> Callable[..., Any]:
    if ":" not in name and name not in OURS:
        names = ", ".join(sorted(OURS))
        raise SettingsError(
            f"run.environment must be one of {names}, or path/to/file.py:Class or module:Class, "
            f"got {name!r}; choose one, or name your class in this form"
        )
    factory: Callable[..., Any] = load_user_code(
        OURS.get(name, name), setting="run.environment", kind="class"
    )
    return factory
