"""Waits for what tells a test nothing: other processes, threads, servers."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, overload

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found | None],
    what: str | Callable[[], str] = "it did not happen",
    *,
    timeout_s: float = 30.0,
    every_s: float = 0.02,
    ignoring: type[Exception] | tuple[type[Exception], ...] = (),
) -> Found:
    """Return what the condition returns as soon as it is true.

    Args:
        condition: Asked again and again.
        what: Text of the failure, or what makes it, such as a function that reads logs.
        timeout_s: Patience; after it the test fails.
        every_s: Pause between two looks.
        ignoring: Errors of the condition that mean that it does not hold yet.
    """
    deadline = time.monotonic() + timeout_s
    errors = ignoring if isinstance(ignoring, tuple) else (ignoring,)
    while True:
        with suppress(*errors):
            if found := condition():
                return found
        _check(deadline, what, timeout_s)
        time.sleep(every_s)


@overload
async def until(
    condition: Callable[[], Awaitable[Found | None]],
    what: str | Callable[[], str] = ...,
    *,
    timeout_s: float = ...,
    every_s: float = ...,
    ignoring: type[Exception] | tuple[type[Exception], ...] = ...,
) -> Found: ...


@overload
async def until(
    condition: Callable[[], Found | None],
    what: str | Callable[[], str] = ...,
    *,
    timeout_s: float = ...,
    every_s: float = ...,
    ignoring: type[Exception] | tuple[type[Exception], ...] = ...,
) -> Found: ...


async def until(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "it did not happen",
    *,
    timeout_s: float = 30.0,
    every_s: float = 0.01,
    ignoring: type[Exception] | tuple[type[Exception], ...] = (),
) -> Any:
    """Let the loop turn until the condition, which may be awaitable, is true, as `wait_until`."""
    deadline = time.monotonic() + timeout_s
    errors = ignoring if isinstance(ignoring, tuple) else (ignoring,)
    while True:
        with suppress(*errors):
            found = condition()
            if found := await found if inspect.isawaitable(found) else found:
                return found
        _check(deadline, what, timeout_s)
        await asyncio.sleep(every_s)


async def still_waits(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether a task goes on for so long; one that ends is noticed at once."""
    ended, _ = await asyncio.wait({task}, timeout=seconds)
    return not ended


def _check(deadline: float, what: str | Callable[[], str], timeout_s: float) -> None:
    if time.monotonic() > deadline:
        raise AssertionError(
            f"{what if isinstance(what, str) else what()}\nThe patience was {timeout_s:g} s."
        )


def is_alive(pid):
    """Whether a process runs; one that ended and was not reaped yet is dead too."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_pid(path):
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())
