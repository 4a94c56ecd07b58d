"""An environment whose episodes are played in its host; rows of a dataset stay with the actor.

A host that dies is started again, at most five times in ten minutes. Made by
`actors/environments/registry.py` where a run names a Python or packages of its environment.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from packaging.requirements import Requirement

from actors.chat import GivenPrompt
from actors.environments.base import Conversation, Environment, Score, Segment, Step, columns_of
from configs.errors import SettingsError

from .process import HostError, HostProcess

# --------------------------------------------------------------------------------------------------
# A host that is started again when it dies, a bounded number of times.
#
# new --start--> serving --dies--> its episodes fail --the next begin, after a pause--> serving
#                                  too often within DEATHS_S: every begin fails at once

START_S = 60.0  # its environment may load a table
MOST_DEATHS = 5
DEATHS_S = 600.0
PAUSE_S = 0.5  # times the deaths so far; jittered
GRACE_S = 10.0  # of signs of life, which come every second


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The Python, the class and the settings of a host."""

    python: Path
    requirements: Sequence[Requirement]
    """Packages that must be installed there, with their versions."""
    name: str
    """Name of the class: `path/to/file.py:Class` or `module:Class`."""
    settings: dict[str, Any]
    """Keywords of the class."""
    setting: str
    """Setting that names the class, for errors."""
    plays_rows: bool
    """The class is the factory of a dataset."""
    needs_reward: bool
    threads: int


class Host:
    """The present process of an environment, which is replaced when it dies."""

    def __init__(self, settings: HostSettings) -> None:
        """Start the first process, and make the environment in it; waits up to 60 s for each.

        Raises:
            SettingsError: The environment cannot be made, or a package is not as required.
        """
        self._settings = settings
        self._starting = threading.Lock()
        self._deaths: list[float] = []
        self._process = HostProcess(settings.python, threads=settings.threads)
        try:
            self.description, self.can_replay = self._open()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the present process."""
        if hasattr(self, "_process"):
            self._process.kill("it was closed")

    async def alive(self) -> HostProcess:
        """Return a process that has not ended; after a pause of seconds start one if need be.

        Raises:
            HostError: The process has died too often, or the environment cannot be made again.
        """
        if self._process.end_reason is not None:
            await asyncio.to_thread(self._restart)
        return self._process

    def _restart(self) -> None:
        with self._starting:
            if self._process.end_reason is None:
                return
            now = time.monotonic()
            self._deaths = [death for death in self._deaths if now - death < DEATHS_S]
            if len(self._deaths) >= MOST_DEATHS:
                raise HostError(
                    f"{self._settings.setting} must be a class whose host process lives, got "
                    f"{self._settings.name}, whose host has died {MOST_DEATHS + 1} times in "
                    f"{DEATHS_S:g} s, the last time because {self._process.end_reason}; mend the "
                    f"class: what its process printed is in the actor's log"
                )
            self._deaths.append(now)
            time.sleep(PAUSE_S * len(self._deaths) * random.uniform(0.5, 1.5))
            self._process = HostProcess(self._settings.python, threads=self._settings.threads)
            try:
                self._open()
            except SettingsError as error:
                self._process.kill(str(error))
                raise HostError(str(error)) from error

    def _open(self) -> tuple[str, bool]:
        settings = self._settings
        names = [requirement.name for requirement in settings.requirements]
        versions = self._ask_at_start("versions", packages=names)
        for requirement in settings.requirements:
            _check(requirement, versions[requirement.name], settings.python)
        keywords = {
            "name": settings.name,
            "settings": settings.settings,
            "setting": settings.setting,
            "plays_rows": settings.plays_rows,
            "needs_reward": settings.needs_reward,
        }
        reply = self._ask_at_start("open", given=keywords)
        return str(reply["description"]), bool(reply["can_replay"])

    def _ask_at_start(self, do: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._process.submit(do, **arguments).result(START_S)
        except TimeoutError:
            text = f"no end within {START_S:g} s"
        except HostError as error:
            if error.is_ours:
                raise SettingsError(str(error)) from error
            text = str(error)
        setting, name, python = self._settings.setting, self._settings.name, self._settings.python
        raise SettingsError(
            f"{setting} must be made in its host, got from {name} in {python}: {text}; mend the "
            "class, the settings it is made with, or that Python"
        )


async def ask(process: HostProcess, do: str, *, limit_s: float, **arguments: Any) -> dict[str, Any]:
    """Make a call in a host process, which keeps the time limit itself: calls wait for their turn.

    A process without a sign of life for 10 s longer than the limit is killed.

    Raises:
        HostError: The call failed, or the process died or gave no sign of life.
    """
    future = asyncio.wrap_future(process.submit(do, limit_s=limit_s, **arguments))
    while not future.done():
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(future)
        if not future.done() and process.silent_s > limit_s + GRACE_S:
            process.kill(f"it has been silent for {process.silent_s:.0f} s")
    return future.result()


def _check(requirement: Requirement, version: str | None, python: Path) -> None:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        raise SettingsError(
            f"run.environment_requirements must be met by {python}, got "
            f"{requirement.name} {version or 'not installed'} for {str(requirement)!r}; install "
            f"that version there, and remove packages that conflict with it"
        )


# --------------------------------------------------------------------------------------------------
# An environment whose episodes are played in its host; rows of a dataset stay with the actor.

T = TypeVar("T")

CALL_S = 60.0  # limit of a call that is awaited without one


@dataclass(frozen=True, slots=True)
class HostedCall(Generic[T]):
    """A call of a host, which keeps the limit itself."""

    begin: Callable[[float], Coroutine[Any, Any, T]]

    def within(self, limit_s: float) -> Coroutine[Any, Any, T]:
        """Make the call with a time limit, which does not count its wait for other calls."""
        return self.begin(limit_s)

    def __await__(self) -> Generator[Any, None, T]:
        return self.within(CALL_S).__await__()


class _Begun(msgspec.Struct):
    """Reply of a host to `begin`."""

    prompt: str | list[dict[str, Any]]
    answer: str | None
    demonstration: list[tuple[str, bool]]
    columns: dict[str, Any]
    tools: str


class _Stepped(msgspec.Struct):
    """Reply of a host to `step`."""

    observation: str | list[dict[str, Any]]
    done: bool


class _Scored(msgspec.Struct):
    """Reply of a host to `score`."""

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
        self.process.drop_episode(self.episode)

    def step(self, text: str) -> HostedCall[Step]:
        """Take a turn of the policy; awaiting it raises `HostError` where the host fails."""
        return HostedCall(lambda limit_s: self._step(text, limit_s))

    def score(self) -> HostedCall[Score]:
        """Judge the episode, in the host or by its row; awaiting it raises as for `step`."""
        return HostedCall(self._score)

    async def _begin(
        self, index: int, seed: int, *, held_out: bool, limit_s: float
    ) -> HostedConversation:
        row = None
        if self.row is not None:
            columns = columns_of(self.row)
            row = {"prompt": self.row.prompt, "answer": self.row.answer, "columns": columns}
        item = {"index": index, "seed": seed, "held_out": held_out, "row": row}
        begun = await self._ask("begin", _Begun, limit_s, **item)
        self.prompt, self.answer, self.columns = begun.prompt, begun.answer, begun.columns
        self.demonstration = tuple(Segment(*segment) for segment in begun.demonstration)
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

    async def _ask(self, do: str, kind: type[T], limit_s: float, **arguments: Any) -> T:
        reply = await ask(self.process, do, limit_s=limit_s, episode=self.episode, **arguments)
        try:
            return msgspec.convert(reply, kind)
        except msgspec.ValidationError as error:
            raise HostError(
                f"what an environment returns for {do} must have the types in "
                f"docs/environments.md, got: {error}; mend what its class returns"
            ) from None


class HostedEnvironment:
    """Source of episodes in a host."""

    is_async = True

    def __init__(self, host: Host, rows: Environment | None) -> None:
        """Prepare.

        Args:
            host: Host of the class.
            rows: Dataset whose questions the class plays; None = the class has its own questions.
        """
        self._host = host
        self._rows = rows
        self._episodes = count()

    @property
    def can_replay(self) -> bool:
        """Whether the same texts give the same observations."""
        return self._host.can_replay

    def begin(self, index: int, seed: int, *, held_out: bool) -> HostedCall[HostedConversation]:
        """Begin the episode of an item; awaiting it raises as for `HostedConversation.step`."""

        async def begin(limit_s: float) -> HostedConversation:
            rows = self._rows
            row = None if rows is None else rows.begin(index, seed, held_out=held_out)
            process = await self._host.alive()
            conversation = HostedConversation(process, next(self._episodes), row)
            return await conversation._begin(index, seed, held_out=held_out, limit_s=limit_s)

        return HostedCall(begin)

    def describe(self) -> str:
        """Return the descriptions of the class and of its rows."""
        rows = f" over {self._rows.describe()}" if self._rows else ""
        return f"{self._host.description}{rows}"

    def another(self) -> HostedEnvironment:
        """Return itself: one host plays any number of episodes."""
        return self
