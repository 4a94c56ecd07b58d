"""An environment whose episodes are played in its host; rows of a dataset stay with the actor."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

import msgspec

from actors.chat import GivenPrompt
from actors.environments.base import Conversation, Environment, Score, Segment, Step, columns_of

from .host import Host, ask
from .process import HostError, HostProcess

T = TypeVar("T")

CALL_S = 60.0  # where nobody says how long a call may take


@dataclass(frozen=True, slots=True)
class HostedCall(Generic[T]):
    """A call of a host, which keeps the limit itself."""

    begin: Callable[[float], Coroutine[Any, Any, T]]

    def within(self, limit_s: float) -> Coroutine[Any, Any, T]:
        """Make the call; it may take so long, its wait for other calls not counted."""
        return self.begin(limit_s)

    def __await__(self) -> Generator[Any, None, T]:
        return self.within(CALL_S).__await__()


class _Begun(msgspec.Struct):
    prompt: str | list[dict[str, Any]]
    answer: str | None
    demonstration: list[tuple[str, bool]]
    columns: dict[str, Any]
    tools: str


class _Stepped(msgspec.Struct):
    observation: str | list[dict[str, Any]]
    done: bool


class _Scored(msgspec.Struct):
    reward: float
    parts: dict[str, float]
    metrics: dict[str, float]
    answer: str | None
    columns: dict[str, Any]
    is_of_row: bool


@dataclass(eq=False)
class HostedConversation:
    """One episode; it fails when its process dies."""

    process: HostProcess
    episode: int
    row: Conversation | None
    prompt: GivenPrompt = ""
    answer: str | None = None
    demonstration: tuple[Segment, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)
    tools: str = ""

    def __del__(self) -> None:
        self.process.leave(self.episode)

    def step(self, text: str) -> HostedCall[Step]:
        """Take a turn of the policy."""
        return HostedCall(lambda limit_s: self._step(text, limit_s))

    def score(self) -> HostedCall[Score]:
        """Judge the episode, in the host or by its row."""
        return HostedCall(self._score)

    async def _begin(
        self, index: int, seed: int, *, held_out: bool, limit_s: float
    ) -> HostedConversation:
        row = None
        if self.row is not None:
            columns = columns_of(self.row)
            row = {"prompt": self.row.prompt, "answer": self.row.answer, "columns": columns}
        given = {"index": index, "seed": seed, "held_out": held_out, "row": row}
        begun = await self._ask("begin", _Begun, limit_s, **given)
        self.prompt, self.answer, self.columns = begun.prompt, begun.answer, begun.columns
        self.demonstration = tuple(Segment(*each) for each in begun.demonstration)
        self.tools = begun.tools
        return self

    async def _step(self, text: str, limit_s: float) -> Step:
        if self.row is not None:
            self.row.step(text)
        step = await self._ask("step", _Stepped, limit_s, text=text)
        return Step(step.observation, step.done)

    async def _score(self, limit_s: float) -> Score:
        scored = await self._ask("score", _Scored, limit_s)
        self.answer, self.columns = scored.answer, scored.columns
        if scored.is_of_row:
            assert self.row is not None
            score = self.row.score()
            return Score(score.reward, score.parts, score.metrics | scored.metrics)
        return Score(scored.reward, scored.parts, scored.metrics)

    async def _ask(self, do: str, kind: type[T], limit_s: float, **given: Any) -> T:
        found = await ask(self.process, do, limit_s=limit_s, episode=self.episode, **given)
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise HostError(f"an answer of the environment to {do}: {error}") from None


class HostedEnvironment:
    """Source of episodes in a host."""

    is_async = True

    def __init__(self, host: Host, rows: Environment | None) -> None:
        """Prepare.

        Args:
            host: Of the class.
            rows: Whose questions it plays; None = it has its own.
        """
        self._host = host
        self._rows = rows
        self._episodes = count()

    @property
    def can_replay(self) -> bool:
        """Whether the same texts give the same observations."""
        return self._host.can_replay

    def begin(self, index: int, seed: int, *, held_out: bool) -> HostedCall[HostedConversation]:
        """Begin the episode of an item."""

        async def begin(limit_s: float) -> HostedConversation:
            rows = self._rows
            row = None if rows is None else rows.begin(index, seed, held_out=held_out)
            process = await self._host.alive()
            conversation = HostedConversation(process, next(self._episodes), row)
            return await conversation._begin(index, seed, held_out=held_out, limit_s=limit_s)

        return HostedCall(begin)

    def describe(self) -> str:
        """Return what the class says, and what its rows are."""
        rows = f" over {self._rows.describe()}" if self._rows else ""
        return f"{self._host.description}{rows}"

    def another(self) -> HostedEnvironment:
        """Return itself: it takes as many episodes as there are."""
        return self
