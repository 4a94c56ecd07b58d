"""Reward functions of the user: found by name, recognised by their parameters, called and checked.

Sync or async, in the forms of several projects:

    def f(prompts, completions, **kwargs) -> list[float]     TRL
    def f(queries, prompts, labels) -> list[float]           OpenRLHF: query = prompt + completion
    def f(output, prompt) -> float                           one sample
    def f(completion, answer) -> float                       one sample
    def f(data_source, solution_str, ground_truth, extra_info) -> float            verl
    def f(prompt, completions, prompt_ids, completion_ids, **kwargs) -> float      AReaL

A function gets the values that its parameters name, or all values with `**kwargs`. Besides the
names above these are `answer`, and the columns of the item (`Conversation.columns`) under their own
names, with `index`, `purpose` and `environment_reward` where no column has that name. Values of
columns keep their types, and the columns `reward_model` and `extra_info` have the form that verl's
functions expect. With several samples each value is a list; prompts and completions are messages
where the prompt has messages. `None` means that the function does not count for a sample. A
function of several samples with an attribute `whole_groups = True` gets all answers to one prompt
in each call, and no others: parts of a group that actors share, and single answers in evaluations.

Runs inside the reward worker; processes and time limits are in `process.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import groupby
from typing import Any

from actors.chat import ChatMessage, Prompt, as_given, read_prompt, text_of
from actors.environments.base import Conversation, columns_of
from configs.errors import RewardError, SettingsError, quoted
from configs.user_code import load_user_code

FORMS = (
    "f(prompts, completions, **kwargs) -> list[float], f(output, prompt) -> float "
    "or f(completion, answer) -> float"
)
TEXTS = {"output", "completion", "solution_str"}
BATCHES = {"prompts", "completions", "queries"}

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardSample:
    """The arguments of a reward function for one finished episode."""

    prompt: Prompt
    prompt_ids: Sequence[int]
    completion: str
    """All turns and observations, without the last end token."""
    completion_ids: Sequence[int]
    answer: str | None
    index: int
    purpose: str
    environment_reward: float
    """The environment's own score."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the item."""
    turns: tuple[ChatMessage, ...] = ()
    """All turns and observations one by one."""
    data_source: str = ""
    """Name of the environment, by which verl's functions tell tasks apart."""

    @classmethod
    def from_conversation(
        cls,
        conversation: Conversation,
        turns: Sequence[ChatMessage],
        *,
        index: int = 0,
        purpose: str = "train",
        environment_reward: float = 0.0,
        completion: str | None = None,
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        data_source: str = "",
    ) -> RewardSample:
        """Make the arguments for a conversation with these turns after the prompt.

        Args:
            conversation: The item.
            turns: All turns and observations.
            index: Number of the item.
            purpose: `train` or `eval`.
            environment_reward: The environment's own score.
            completion: The completion decoded from its tokens; None = the turns joined.
            prompt_ids: Tokens of the prompt.
            completion_ids: Tokens of the completion.
            data_source: Name of the environment.
        """
        said = "".join(turn.content for turn in turns)
        return cls(
            prompt=read_prompt(conversation.prompt),
            prompt_ids=prompt_ids,
            completion=said if completion is None else completion,
            completion_ids=completion_ids,
            answer=conversation.answer,
            index=index,
            purpose=purpose,
            environment_reward=environment_reward,
            columns=columns_of(conversation),
            turns=tuple(turns),
            data_source=data_source,
        )


class Convention(StrEnum):
    """Call of a reward function: with any samples, with those of one group, or with one sample."""

    BATCH = "batch"
    GROUP = "group"
    SAMPLE = "sample"


def load_reward(reward: str) -> RewardFunction:
    """Find `path.py:function` or `module:function`.

    Raises:
        SettingsError: The file, module or function cannot be loaded.
    """
    function: RewardFunction = load_user_code(reward, setting="run.reward", kind="function")
    return function


def recognise(function: RewardFunction, reward: str) -> Convention:
    """Return how a function is to be called, by its parameters.

    Raises:
        SettingsError: The parameters are none of the known forms.
    """
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    is_areals = {"prompt", "completions"} <= names  # one completion, for all its plural
    ranks = getattr(function, "whole_groups", False)
    if names & BATCHES and not is_areals:
        return Convention.GROUP if ranks else Convention.BATCH
    if ranks:
        raise SettingsError(
            f"run.reward must take all samples of a group, as f(prompts, completions, **kwargs) "
            f"does, where the function has the attribute whole_groups, got {reward!r} with "
            f"({', '.join(parameters)}); give it these parameters, or remove the attribute"
        )
    if is_areals or names & TEXTS:
        return Convention.SAMPLE
    raise SettingsError(
        f"run.reward must be of the form {FORMS}, got {reward!r} with "
        f"({', '.join(parameters)}); give it the parameters of one of these"
    )


def call_batch(function: RewardFunction, samples: Sequence[RewardSample]) -> Any:
    """Call a batched function; `values_of` reads its result, which may have to be awaited first.

    Raises:
        RewardError: A parameter without a default has a name that no value has.
        Exception: The function raised it.
    """
    # OpenRLHF's functions cut the prompt off the query, so both are always texts.
    chat = "queries" not in inspect.signature(function).parameters
    return function(**_accepted_arguments(function, _batch_arguments(samples, chat=chat)))


def values_of(answer: Any, *, count: int) -> list[object]:
    """Return the values of a batched function, one for each sample; they are not checked yet.

    Raises:
        RewardError: The function did not return a list of `count` values.
    """
    values: Any = answer.get("rewards") if isinstance(answer, dict) else answer  # OpenRLHF's
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward must be a list of floats, got {type(values).__name__}; return such a list "
            "from it"
        )
    if len(values) != count:
        raise RewardError(
            f"reward must be a list of {count} floats, one for each completion, got {len(values)}; "
            "return as many"
        )
    return list(values)


def call_sample(function: RewardFunction, sample: RewardSample) -> Any:
    """Call a function of one sample; `value_of` reads its result, maybe awaited first.

    Raises as `call_batch`.
    """
    return function(**_accepted_arguments(function, _sample_arguments(sample)))


def value_of(answer: Any) -> object:
    """Return the value of a function of one sample, which is not checked yet."""
    return answer.get("score") if isinstance(answer, dict) else answer  # verl's


def checked(value: object) -> float | None:
    """Return a reward as a finite float; None = the function does not count for this sample.

    Raises:
        RewardError: The value is no finite number.
    """
    if value is None:
        return None
    as_python = getattr(value, "item", None)  # a number of numpy or torch
    if callable(as_python):
        value = as_python()
    if not isinstance(value, int | float):
        raise RewardError(f"reward must be a float, got {quoted(value)}; return a number from it")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(
            f"reward must be finite, got {number}; return 0 or another number for such a sample"
        )
    return number


_AFTER_COLUMNS = ("index", "purpose", "environment_reward", "data_source")
"""Nyala's names that a column may have too; the column then comes first."""
_BEFORE_COLUMNS = [
    sample_field.name
    for sample_field in fields(RewardSample)
    if sample_field.name not in ("columns", "turns", *_AFTER_COLUMNS)
]


def _batch_arguments(samples: Sequence[RewardSample], *, chat: bool) -> dict[str, Any]:
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    ours = {name: [getattr(sample, name) for sample in samples] for name in _BEFORE_COLUMNS}
    del ours["prompt"], ours["completion"]
    ours["answer"] = [_with_type(sample.answer, sample.columns.get("answer")) for sample in samples]
    arguments: dict[str, Any] = {
        name: [getattr(sample, name) for sample in samples] for name in _AFTER_COLUMNS
    }
    arguments |= {name: [sample.columns.get(name) for sample in samples] for name in columns}
    return arguments | {
        "prompts": [_prompt_of(sample) if chat else text_of(sample.prompt) for sample in samples],
        "completions": [
            _completion_of(sample) if chat else sample.completion for sample in samples
        ],
        "queries": [text_of(sample.prompt) + sample.completion for sample in samples],
        "labels": ours["answer"],
        **ours,
    }


def _prompt_of(sample: RewardSample) -> str | list[dict[str, str]]:
    return sample.prompt if isinstance(sample.prompt, str) else as_given(sample.prompt)


def _completion_of(sample: RewardSample) -> str | list[dict[str, str]]:
    return sample.completion if isinstance(sample.prompt, str) else as_given(sample.turns)


def _sample_arguments(sample: RewardSample) -> dict[str, Any]:
    return (
        {name: getattr(sample, name) for name in _AFTER_COLUMNS}
        | sample.columns
        | {name: getattr(sample, name) for name in _BEFORE_COLUMNS}
        | {"prompt": text_of(sample.prompt)}
        | {
            "output": sample.completion,
            "completions": sample.completion,
            "solution_str": sample.completion,
            "ground_truth": _ground_truth(sample),
            "extra_info": _extra_info(sample),
        }
    )


def _with_type(answer: str | None, value: Any) -> Any:
    """Return the value of the reference's column where both are equal, to keep its type."""
    return value if answer is not None and answer == str(value) else answer


def _ground_truth(sample: RewardSample) -> Any:
    """Return the reference; of a row in verl's form the value there, which may be an object."""
    reward_model = sample.columns.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    return truth if sample.answer is None else _with_type(sample.answer, truth)


def _extra_info(sample: RewardSample) -> dict[str, Any]:
    """Return the row's `extra_info`, or else all columns, with the keys that verl adds."""
    extra_info = sample.columns.get("extra_info")
    if not isinstance(extra_info, dict):
        extra_info = sample.columns | {"index": sample.index, "split": sample.purpose}
    says = [turn.role == "assistant" for turn in sample.turns]
    num_turns = 1 + sum(1 for _ in groupby(says))  # verl counts the prompt, too
    return extra_info | {"num_turns": num_turns, "rollout_reward_scores": {}}


def _accepted_arguments(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not is_open and name not in arguments:
            raise RewardError(
                f"a parameter of the reward must be one of {', '.join(sorted(arguments))}, got "
                f"{name!r}; rename it, give it a default, or add a column of that name to the data"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
