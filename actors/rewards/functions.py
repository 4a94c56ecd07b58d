"""Reward functions of the user: found by name, recognised by their parameters, called and checked.

Three forms, sync or async:

    def f(prompts, completions, **kwargs) -> list[float]     TRL's batched contract
    def f(output, prompt) -> float                           one sample
    def f(completion, answer) -> float                       one sample

A function gets by name what its parameters ask for, all of it with `**kwargs`: `prompts`,
`completions`, `completion_ids`, `answer`, `index`, `purpose`, `environment_reward`; one sample at a
time the first three are called `prompt`, `completion` (or `output`) and `completion_ids`.

Runs inside the reward worker; processes and time limits are in `process.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from configs.errors import RewardError, SettingsError
from configs.own_code import load_own

FORMS = (
    "f(prompts, completions, **kwargs) -> list[float], f(output, prompt) -> float "
    "or f(completion, answer) -> float"
)

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardSample:
    """The arguments of a reward function for one finished episode."""

    prompt: str
    completion: str
    """All turns and observations, without the last end token."""
    completion_ids: Sequence[int]
    answer: str | None
    index: int
    purpose: str
    environment_reward: float
    """The environment's own score."""


class Convention(StrEnum):
    """Call of a reward function: with all samples of a batch, or with one."""

    BATCH = "batch"
    SAMPLE = "sample"


def load_reward(reward: str) -> RewardFunction:
    """Find `path.py:function` or `module:function`.

    Raises:
        SettingsError: The file, module or function cannot be loaded.
    """
    function: RewardFunction = load_own(reward, setting="run.reward", kind="function")
    return function


def recognise(function: RewardFunction, reward: str) -> Convention:
    """Return how a function is to be called, by its parameters.

    Raises:
        SettingsError: The parameters are none of the known forms.
    """
    parameters = inspect.signature(function).parameters
    batched = "completions" in parameters or "prompts" in parameters
    if not batched and not {"output", "completion"} & set(parameters):
        raise _refusal(f"of the form {FORMS}", reward, f"it has ({', '.join(parameters)})")
    known = set(_columns([])) if batched else set(_arguments(_EXAMPLE))
    for name, parameter in parameters.items():
        is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not is_open and name not in known:
            advice = f"there is no {name!r} among what is given: {', '.join(sorted(known))}"
            raise _refusal(f"of the form {FORMS}", reward, advice)
    return Convention.BATCH if batched else Convention.SAMPLE


def call_batch(function: RewardFunction, samples: Sequence[RewardSample]) -> list[object]:
    """Call a batched function; the values are not checked yet.

    Raises:
        RewardError: It did not return a list of one value for each sample.
    """
    values = _finish(function(**_accepted(function, _columns(samples))))
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(f"reward must be a list of floats, got {type(values).__name__}")
    if len(values) != len(samples):
        raise RewardError(
            f"reward must be a list of {len(samples)} floats, one for each completion, "
            f"got {len(values)}"
        )
    return list(values)


def call_sample(function: RewardFunction, sample: RewardSample) -> object:
    """Call a function of one sample; the value is not checked yet."""
    return _finish(function(**_accepted(function, _arguments(sample))))


def checked(value: object) -> float:
    """Return a reward as a finite float.

    Raises:
        RewardError: It is not a finite number.
    """
    as_python = getattr(value, "item", None)  # a number of numpy or torch
    if callable(as_python):
        value = as_python()
    if not isinstance(value, int | float):
        raise RewardError(f"reward must be a float, got {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"reward must be finite, got {number}")
    return number


_EXAMPLE = RewardSample("", "", (), None, 0, "train", 0.0)


def _columns(samples: Sequence[RewardSample]) -> dict[str, Any]:
    plural = {"prompt": "prompts", "completion": "completions"}
    names = [field.name for field in fields(RewardSample)]
    return {plural.get(name, name): [getattr(s, name) for s in samples] for name in names}


def _arguments(sample: RewardSample) -> dict[str, Any]:
    return asdict(sample) | {"output": sample.completion}


def _accepted(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _finish(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _refusal(constraint: str, reward: str, advice: str) -> SettingsError:
    return SettingsError(f"run.reward must be {constraint}, got {reward!r}; {advice}")
