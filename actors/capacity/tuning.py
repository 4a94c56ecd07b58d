"""Keeping an actor's room at the number of episodes that fills its engine.

Looks once a second, changes nothing by itself: `BatchSize` decides, and says why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from configs.tables.actors import ActorSettings

from .batch_size import BatchSize
from .cache_meter import CacheMeter
from .room import Room, leases_for

LOOK_S = 1.0

log = structlog.get_logger()


class Seen(NamedTuple):
    """An actor at one moment."""

    tokens: int
    """Made since its start."""
    episodes: int
    """Begun and not finished."""
    ended: int
    """With all their tokens, since its start."""


class Tuner:
    """Changes a room by what an engine's cache shows.

    Args:
        room: Of the actor.
        actors: Settings, with the bounds.
        meter: Of the engine's cache.
    """

    def __init__(self, room: Room, actors: ActorSettings, meter: CacheMeter) -> None:
        self._room, self._meter = room, meter
        self._size = BatchSize(actors.least_concurrent_episodes, actors.most_concurrent_episodes)
        room.resize(leases_for(self._size.number))

    @property
    def reason(self) -> str:
        """Of the last change."""
        return self._size.reason

    async def run(self, see: Callable[[], Seen]) -> None:
        """Tune until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic(), see())

    def look(self, now_s: float, seen: Seen) -> None:
        """Look once."""
        size, memory = self._size, self._meter.memory
        if memory is None:
            return
        has_changed = size.look(
            now_s,
            tokens=seen.tokens,
            ended=seen.ended,
            is_full=seen.episodes >= self._room.full_from,
            is_over=seen.episodes > self._room.most,
            memory=memory,
        )
        if has_changed:
            log.info("episodes at a time", number=size.number, reason=size.reason)
            self._room.resize(leases_for(size.number))
