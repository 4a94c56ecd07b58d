"""Calls of an environment's methods, which may be `async`, from a thread or from an event loop.

One coroutine makes the calls of an episode, whatever the environment is: in a thread it is driven
to its end without an event loop, and in an event loop it is awaited like any other. `call` is where
a call begins, so that a time limit is one for each call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from types import coroutine
from typing import Any, TypeVar

from configs.errors import DeadlineError
from configs.own_code import explain

from .base import Conversation, Environment

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """An environment that episodes are made of, as often as it is needed."""

    make: Callable[[], Environment]
    is_async: bool = False
    """Its methods are awaited in an event loop of their own."""
    is_shared: bool = False
    """Its class has `is_thread_safe = True`: all threads use one."""

    @classmethod
    def of(
        cls, environment: Environment, sample: Conversation, make: Callable[[], Environment]
    ) -> EnvironmentSource:
        """Look at an environment and an item of it."""
        methods = (environment.begin, sample.step, sample.score)
        return cls(
            make,
            is_async=needs_loop(environment, *methods),
            is_shared=bool(getattr(environment, "is_thread_safe", False)),
        )


def needs_loop(environment: Environment, *methods: Callable[..., object]) -> bool:
    """Whether these methods of an environment are to be awaited in an event loop."""
    is_async = getattr(environment, "is_async", False)
    return bool(is_async) or any(iscoroutinefunction(method) for method in methods)


async def call(
    function: Callable[..., T | Awaitable[T]], *args: Any, limit_s: float, **kwargs: Any
) -> T:
    """Call a method of an environment or a conversation.

    Raises:
        DeadlineError: It is `async` and was not over in time.
    """
    await _next_call()
    value = function(*args, **kwargs)
    if not isawaitable(value):
        return value
    within: Callable[[float], Coroutine[Any, Any, T]] | None = getattr(value, "within", None)
    if within is not None:  # `HostedCall`: it may have to wait for its turn, and limits itself
        return await within(limit_s)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await value
    except TimeoutError as error:
        if not limit.expired():
            raise
        stood = error.__cause__ or error.__context__ or error  # no cause before Python 3.11.4
        raise overdue(limit_s, explain(stood).partition(", at ")[2]) from error


def drive(work: Coroutine[Any, Any, T], on_call: Callable[[], object] = lambda: None) -> T:
    """Do the work of a coroutine in this thread, whose calls are those of no `async` method.

    Args:
        work: Waits for nothing.
        on_call: Called before each call of the environment.
    """
    try:
        while True:
            work.send(None)
            on_call()
    except StopIteration as end:
        result: T = end.value
        return result


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a coroutine of any environment, outside of event loops: for checks."""
    return asyncio.run(work)


def overdue(limit_s: float, place: str) -> DeadlineError:
    """Return the error of a call that takes too long, with the place where it stands."""
    return DeadlineError(
        f"environment must answer within actors.environment_timeout_s = {limit_s:g} s, got no end"
        f"{', at ' if place else ''}{place}"
    )


@coroutine
def _next_call() -> Generator[None, None, None]:
    yield
