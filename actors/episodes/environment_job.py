"""A piece of work on one episode that calls its environment."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from actors.environments.base import Environment


@dataclass(eq=False, slots=True)
class Job:
    """Work in an environment's thread or event loop."""

    work: Callable[[Environment], Coroutine[Any, Any, Any]]
    done: Callable[[Any], None]
    """Called in the actor's event loop with what the work returned or raised."""
    is_over: bool = False
    """`done` was called; what comes later is dropped."""
