"""Threads of an environment host, and calls that take too long.

    put --> a lane's queue --its thread--> done, or an awaitable --the host's event loop--> done

A lane has an environment of its own, or the one of all where its class is thread-safe; an episode
stays on the lane that began it. A thread whose call takes too long is left behind and another goes
on with its lane.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from actors.environments.base import Environment
from actors.environments.calls import overdue
from configs.own_code import own_place

MAX_HUNG = 3  # threads left behind, and as many more as there may be threads
HUNG = 78
"""Exit status of a host with too many of them."""
MAKE_S = 60.0  # an environment may load a table
TICK_S = 0.1


@dataclass(slots=True)
class Call:
    """One call of an environment."""

    work: Callable[[Lane], Any]
    done: Callable[[Any], None]
    """Gets what the call returned or raised; called once."""
    limit_s: float


class Lane:
    """An environment, the calls that wait for it, and the thread that makes them."""

    def __init__(self, make: Callable[[], Environment], loop: asyncio.AbstractEventLoop) -> None:
        self._make = make
        self._loop = loop
        self._environment: Environment | None = None
        self._lock = threading.Lock()
        self._turn = 0
        self._call: Call | None = None
        self._since = 0.0
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._thread: threading.Thread
        self.load = 0
        self._start()

    def put(self, call: Call) -> None:
        """Make a call when those before it are over."""
        with self._lock:
            self.load += 1
        self._calls.put(call)

    @property
    def environment(self) -> Environment:
        """The lane's environment, made when it is first asked for."""
        if self._environment is None:
            self._since += MAKE_S
            self._environment = self._make()
            self._since = time.monotonic()
        return self._environment

    def leave_overdue(self) -> bool:
        """Leave the thread behind if its call takes too long."""
        with self._lock:
            call = self._call
            if call is None or time.monotonic() - self._since <= call.limit_s:
                return False
            self._call = None
            self.load -= 1
            frame = sys._current_frames().get(self._thread.ident or 0)
            self._start()
        call.done(overdue(call.limit_s, own_place(traceback.extract_stack(frame))))
        return True

    def _start(self) -> None:
        self._turn += 1
        self._thread = threading.Thread(target=self._serve, args=(self._turn,), daemon=True)
        self._thread.start()

    def _serve(self, turn: int) -> None:
        while turn == self._turn:
            call = self._calls.get()
            self._since, self._call = time.monotonic(), call
            try:
                value = call.work(self)
            except BaseException as error:  # noqa: BLE001 - foreign code; the actor judges
                value = error
            with self._lock:
                if turn != self._turn:
                    return
                self._call = None
                self.load -= 1
            if isawaitable(value):
                asyncio.run_coroutine_threadsafe(_await(value, call), self._loop)
            else:
                call.done(value)


class Lanes:
    """All lanes of a host; at most as many as it may have threads."""

    def __init__(
        self, make: Callable[[], Environment], first: Environment, *, threads: int
    ) -> None:
        """Begin.

        Args:
            make: Makes an environment.
            first: One that is made already.
            threads: Most of them.
        """
        self.is_shared = bool(getattr(first, "is_thread_safe", False))
        self._ready = [first]
        self._make = make
        self._threads = threads
        self._lanes: list[Lane] = []
        self._num_hung = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def free_lane(self) -> Lane:
        """Return the lane on which the fewest calls wait; another one where all are busy."""
        lane = min(self._lanes, key=lambda each: each.load, default=None)
        if lane is None or (lane.load and len(self._lanes) < self._threads):
            lane = Lane(self._next, self._loop)
            self._lanes.append(lane)
        return lane

    def _next(self) -> Environment:
        if self.is_shared:
            return self._ready[0]
        try:
            return self._ready.pop()
        except IndexError:
            return self._make()

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_S)
            self._num_hung += sum(lane.leave_overdue() for lane in list(self._lanes))
            if self._num_hung >= MAX_HUNG + self._threads:
                os._exit(HUNG)


async def _await(value: Any, call: Call) -> None:
    limit = asyncio.timeout(call.limit_s)
    try:
        async with limit:
            found = await value
    except BaseException as error:  # noqa: BLE001 - foreign code; the actor judges
        found = overdue(call.limit_s, "") if limit.expired() else error
    call.done(found)
