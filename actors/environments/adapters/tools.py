"""Episodes with tools: a class whose public methods the policy may call, as TRL takes them.

    class Notes:
        def reset(self, **row) -> str | None     appended to the prompt
        def write(self, text: str) -> str        a tool: type hints, and a docstring with `Args:`
        def get_reward(self) -> float            optional

The policy writes calls (`actors/tool_calls.py`). Each call is answered by a message of the role
`tool`, and a turn without a call ends the episode. The error of a tool that fails is its answer.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from actors.chat import GivenPrompt
from actors.environments.base import Conversation, Score, Segment, Step, columns_of
from actors.environments.calls import drive
from actors.tool_calls import ToolCall, read_calls
from configs.errors import SettingsError

from .games import SharedGenerators

NO_TOOLS = ("reset", "get_reward")


class Tools(NamedTuple):
    """The tools of a class."""

    names: tuple[str, ...]
    schemas: str
    """JSON, as chat templates take it."""
    is_async: bool
    has_reward: bool

    @classmethod
    def from_instance(cls, instance: Any, *, setting: str) -> Tools:
        """Read the tools of an instance.

        Raises:
            SettingsError: The class has no tools, or one without type hints or a docstring.
        """
        members = inspect.getmembers(type(instance), inspect.isfunction)
        names = [name for name, _ in members if not name.startswith("_") and name not in NO_TOOLS]
        if not names or not callable(getattr(instance, "reset", None)):
            raise SettingsError(
                f"{setting} must be a class with reset and public methods that are tools, got "
                f"{type(instance).__name__}; docs/adapters.md shows one"
            )
        methods = [getattr(instance, name) for name in names]
        called = [*methods, getattr(instance, "get_reward", None)]
        schemas = json.dumps([_schema(method, setting) for method in methods])
        is_async = any(inspect.iscoroutinefunction(method) for method in called)
        return cls(tuple(names), schemas, is_async, hasattr(instance, "get_reward"))


class ToolConversation:
    """One episode of an instance of the user's class."""

    demonstration: tuple[Segment, ...] = ()

    def __init__(
        self, instance: Any, tools: Tools, row: Conversation, seed: int, leave: Callable[[], object]
    ) -> None:
        """Begin.

        Args:
            instance: Instance of the user's class, which has no other episode at the same time.
            tools: Tools of the class.
            row: The question.
            seed: Seed of the generators that the process shares.
            leave: Called when the episode is over.
        """
        self._instance = instance
        self._tools = tools
        self._row = row
        self._leave = leave
        self._generators = SharedGenerators(seed)
        self._num_calls = self._num_failures = 0
        self.tools = tools.schemas
        self.answer = row.answer
        self.columns = columns_of(row)
        with self._generators.kept():
            told = instance.reset(**{"prompt": row.prompt} | self.columns)
        self.prompt = _appended(row.prompt, told)

    def step(self, text: str) -> Step:
        """Make the calls of a turn; a turn without one ends the episode.

        Calls of unknown tools and errors of tools become answers to the policy.

        Raises:
            SettingsError: A tool returned a list of parts in place of a text.
        """
        with self._generators.kept():
            return drive(self._step(text))

    def score(self) -> Score:
        """Ask the instance for the reward, or compare the last turn with the row's answer.

        The metrics count the calls of the episode and those that failed.
        """
        return drive(self._score())

    async def _step(self, text: str) -> Step:
        self._row.step(text)
        calls = read_calls(text, json.loads(self.tools))
        results = [await self._result(call) for call in calls]
        return Step([{"role": "tool", "content": text} for text in results], done=not calls)

    async def _result(self, call: ToolCall) -> str:
        self._num_calls += 1
        try:
            if call.name not in self._tools.names:
                raise LookupError(f"there is no tool {call.name}")
            result = getattr(self._instance, call.name)(**call.arguments)
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 - foreign code, called as the policy asks for
            self._num_failures += 1
            return str({"error": str(error)})
        if isinstance(result, list) and any(isinstance(part, Mapping) for part in result):
            raise SettingsError(
                f"the tool {call.name} must return a text, got a list of parts; join the texts in "
                "the tool, and leave images out, which are not supported"
            )
        return str(result)

    async def _score(self) -> Score:
        if self._tools.has_reward:
            reward = self._instance.get_reward()
            score = Score(float(await reward if inspect.isawaitable(reward) else reward))
        else:
            score = self._row.score()
        self._leave()
        calls = {"tool_calls": self._num_calls, "tool_failures": self._num_failures}
        metrics = score.metrics | {name: float(count) for name, count in calls.items()}
        return Score(score.reward, score.parts, metrics)


class AsyncToolConversation(ToolConversation):
    """One episode of an instance with `async` tools."""

    async def step(self, text: str) -> Step:  # type: ignore[override]
        """Make the calls of a turn."""
        return await self._step(text)

    async def score(self) -> Score:  # type: ignore[override]
        """Ask the instance for the reward, or compare the last turn with the row's answer."""
        return await self._score()


def _appended(prompt: GivenPrompt, told: object) -> GivenPrompt:
    """Return the prompt with the text that `reset` returned behind it."""
    if told is not None and not isinstance(told, str):
        raise SettingsError(
            f"reset must return a text or None, got {type(told).__name__}; return the question as "
            "one text, and leave images out, which are not supported"
        )
    if isinstance(prompt, str):
        return prompt + (told or "")
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + (told or "")}]


def _schema(method: Callable[..., Any], setting: str) -> dict[str, Any]:
    try:
        from transformers.utils.chat_template_utils import get_json_schema  # noqa: PLC0415 - heavy
    except ImportError as error:  # in an environment host
        raise SettingsError(
            f"{setting} must have the package transformers for the schemas of its tools, got none "
            f"in {sys.executable}; add it to run.environment_requirements, or install it"
        ) from error
    try:
        schema: dict[str, Any] = get_json_schema(method)
    except Exception as error:  # several kinds, none of them public
        raise SettingsError(
            f"{setting} must have tools with type hints and a docstring that describes each "
            f"argument under `Args:`, got {method.__name__}: {error}; write what is missing"
        ) from error
    return schema
