"""A host that is started again when it dies, a bounded number of times.

new --start--> serving --dies--> its episodes fail --the next begin, after a pause--> serving
                                 too often in a while: every begin fails at once
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from configs.errors import SettingsError

from .process import HostError, HostProcess

START_S = 60.0  # its environment may load a table
MOST_DEATHS = 5
DEATHS_S = 600.0
PAUSE_S = 0.5  # times the deaths so far; jittered
GRACE_S = 10.0  # of signs of life, which come every second


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host is made of."""

    python: Path
    requirements: Sequence[Requirement]
    """What must be installed there, and in which versions."""
    name: str
    """Of the class: `path/to/file.py:Class` or `module:Class`."""
    settings: dict[str, Any]
    """Keywords of the class."""
    setting: str
    """Where it is named, for errors."""
    plays_rows: bool
    """It is the factory of a dataset."""
    needs_reward: bool
    threads: int


class Host:
    """The process of an environment, whichever it is at the time."""

    def __init__(self, settings: HostSettings) -> None:
        """Start the first process.

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
        """End the process."""
        if hasattr(self, "_process"):
            self._process.kill("it was closed")

    async def alive(self) -> HostProcess:
        """Return a process that has not ended; starts one if need be.

        Raises:
            HostError: It has died too often.
        """
        if self._process.end_reason is not None:
            await asyncio.to_thread(self._restart)
        return self._process

    def _restart(self) -> None:
        with self._starting:
            if self._process.end_reason is None:
                return
            now = time.monotonic()
            self._deaths = [each for each in self._deaths if now - each < DEATHS_S]
            if len(self._deaths) >= MOST_DEATHS:
                raise HostError(
                    f"environment host has died {MOST_DEATHS + 1} times in {DEATHS_S:g} s, the "
                    f"last time because {self._process.end_reason}"
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
        own = self._settings
        names = [each.name for each in own.requirements]
        versions = self._asked("versions", packages=names)
        for requirement in own.requirements:
            _check(requirement, versions[requirement.name], own.python)
        given = {
            "name": own.name,
            "settings": own.settings,
            "setting": own.setting,
            "plays_rows": own.plays_rows,
            "needs_reward": own.needs_reward,
        }
        found = self._asked("open", given=given)
        return str(found["description"]), bool(found["can_replay"])

    def _asked(self, do: str, **given: Any) -> dict[str, Any]:
        try:
            return self._process.submit(do, **given).result(START_S)
        except TimeoutError:
            text = f"no end within {START_S:g} s"
        except HostError as error:
            if error.is_ours:
                raise SettingsError(str(error)) from error
            text = str(error)
        own = self._settings
        raise SettingsError(f"{own.setting} must be made by {own.name} in {own.python}, got {text}")


async def ask(process: HostProcess, do: str, *, limit_s: float, **given: Any) -> dict[str, Any]:
    """Have a process make a call, which it limits itself: it may have to wait for its turn.

    Raises:
        HostError: The call failed, or the process died or gave no sign of life.
    """
    future = asyncio.wrap_future(process.submit(do, limit_s=limit_s, **given))
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
            f"that version there, or make room for it: what stands beside it may hold it back"
        )
