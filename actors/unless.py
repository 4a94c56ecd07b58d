"""Work that an event may end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(work: Coroutine[Any, Any, T], event: Coroutine[Any, Any, object]) -> T | None:
    """Do something unless an event comes first, then cancel it and return None."""
    task, other = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, other):
            each.cancel()
        await asyncio.gather(task, other, return_exceptions=True)
