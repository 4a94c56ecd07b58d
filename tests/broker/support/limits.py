"""Probes of the broker's limits."""

from __future__ import annotations

import asyncio

from broker.server.flow_control import RequestLimiter


async def has_room(limiter: RequestLimiter) -> bool:
    """Return whether the limiter lets another request be read, without waiting for one to end."""
    waiting = asyncio.ensure_future(limiter.wait_for_room())
    await asyncio.sleep(0)
    is_open = waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return is_open
