"""Requests to an environment host, and the episodes that it has under way.

    {"call": 1, "do": "open", ...}     makes the environment
    {"call": 2, "do": "begin", ...}    prompt, answer, demonstration, columns, tools
    {"call": 3, "do": "step", ...}     observation, done
    {"call": 4, "do": "score", ...}    reward, parts, metrics; answer and columns once more
    {"do": "leave", ...}               the actor has dropped an episode

Each is answered by `{"call": n, "found": {...}}` or `{"call": n, "error": "..."}`, in any order; a
frame without a call says that the host is alive. Imports no package.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import isawaitable
from typing import Any, BinaryIO

from actors.environments.adapters.forms import adapt, over_rows
from actors.environments.base import Environment, Score, Segment, Step, columns_of, tools_of
from actors.environments.calls import overdue
from configs.child import MalformedFrame, as_frame, read_frame
from configs.errors import NyalaError
from configs.own_code import explain, load_own, own_place

# --------------------------------------------------------------------------------------------------
# Messages between an actor and an environment host: frames of JSON.
#
# Both sides read what the other's code may have spoilt. JSON, because the host's Python need not
# have a package of ours.

MAX_FRAME_BYTES = 16 * 2**20  # a prompt with the columns of its row


def pack_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        ValueError: It is too long, or holds what is no plain data.
    """
    try:
        body = json.dumps(message, default=_plain).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"what an environment gives must be plain data: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"what an environment gives must be at most {MAX_FRAME_BYTES:,} bytes, "
            f"got {len(body):,}"
        )
    return as_frame(body)


def read_message(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """Return the next message; None = the other side has ended.

    Raises:
        MalformedFrame: There is something else.
    """
    body = read_frame(read, max_bytes=MAX_FRAME_BYTES)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error
    if not isinstance(message, dict):
        raise MalformedFrame("a frame without names")
    return message


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's, all else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# --------------------------------------------------------------------------------------------------
# Threads of an environment host, and calls that take too long.
#
#     put --> a lane's queue --its thread--> done, or an awaitable --the host's event loop--> done
#
# A lane has an environment of its own, or the one of all where its class is thread-safe; an
# episode stays on the lane that began it. A thread whose call takes too long is left behind and
# another goes on with its lane.

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


# --------------------------------------------------------------------------------------------------
# Requests to an environment host, and the episodes that it has under way.

BEAT_S = 1.0
FORGOTTEN = "an episode that this host does not know"


class GivenRow:
    """A row of the actor's dataset, for a class that plays it; the actor scores it."""

    demonstration: tuple[Segment, ...] = ()

    def __init__(self, row: dict[str, Any]) -> None:
        self.prompt, self.answer, self.columns = row["prompt"], row["answer"], row["columns"]
        self.is_asked = False

    def step(self, text: str) -> Step:  # noqa: ARG002 - the actor takes it too
        """Take the text of a turn."""
        return Step()

    def score(self) -> Score:
        """Note that the actor is to score it."""
        self.is_asked = True
        return Score(0.0)


class GivenRows(threading.local):
    """Rows as they come with the requests, in the thread that begins an episode."""

    row: GivenRow

    def begin(self, index: int, seed: int, *, held_out: bool) -> GivenRow:  # noqa: ARG002 - the actor chose
        """Return the row of the request at hand."""
        return self.row

    def describe(self) -> str:
        """Say that they are the actor's."""
        return "rows"


class Serving:
    """Answers requests; `send` may be called from any thread."""

    def __init__(self, send: Callable[[dict[str, Any]], None], *, threads: int) -> None:
        self._send = send
        self._threads = threads
        self._rows = GivenRows()
        self._lanes: Lanes
        self._episodes: dict[int, tuple[Lane, Any, GivenRow | None]] = {}

    def take(self, request: dict[str, Any]) -> None:
        """Take a request; it is answered now or later."""
        if request["do"] == "leave":
            self._episodes.pop(request["episode"], None)
            return
        answer = partial(self._answer, request["call"])
        try:
            if request["do"] == "versions":
                answer({name: _version(name) for name in request["packages"]})
            elif request["do"] == "open":
                answer(self._open(**request["given"]))
            else:
                self._put(request, answer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; the actor judges
            answer(error)

    def _open(
        self,
        *,
        name: str,
        settings: dict[str, Any],
        setting: str,
        plays_rows: bool,
        needs_reward: bool,
    ) -> dict[str, Any]:
        own = load_own(name, setting=setting, kind="class")
        make: Callable[[], Environment]
        if plays_rows:
            make = partial(over_rows, self._rows, own, settings, needs_reward=needs_reward)
        else:
            bare = partial(own, **settings)
            make = lambda: adapt(bare(), bare, name=name, needs_reward=needs_reward)  # noqa: E731
        first = make()
        another: Callable[[], Environment] = getattr(first, "another", make)
        self._lanes = Lanes(another, first, threads=self._threads)
        return {"description": first.describe(), "can_replay": getattr(first, "can_replay", True)}

    def _put(self, request: dict[str, Any], answer: Callable[[Any], None]) -> None:
        if request["do"] == "begin":
            row = None if request["row"] is None else GivenRow(request["row"])
            lane = self._lanes.free_lane()
            work: Callable[[Lane], Any] = partial(self._begin, request, row)
            read: Callable[[Any], Any] = partial(self._begun, request["episode"], lane, row)
        else:
            if request["episode"] not in self._episodes:
                raise LookupError(FORGOTTEN)
            lane, conversation, row = self._episodes[request["episode"]]
            lane = self._lanes.free_lane() if self._lanes.is_shared else lane
            if request["do"] == "step":
                work, read = (lambda _: conversation.step(request["text"])), _stepped
            else:
                work, read = (lambda _: conversation.score()), partial(_scored, conversation, row)
        lane.put(Call(work, lambda value: answer(_read(read, value)), request["limit_s"]))

    def _begin(self, request: dict[str, Any], row: GivenRow | None, lane: Lane) -> Any:
        if row is not None:
            self._rows.row = row
        index, seed = request["index"], request["seed"]
        return lane.environment.begin(index, seed, held_out=request["held_out"])

    def _begun(
        self, episode: int, lane: Lane, row: GivenRow | None, conversation: Any
    ) -> dict[str, Any]:
        found = _shown(conversation) | {
            "prompt": conversation.prompt,
            "demonstration": [list(segment) for segment in conversation.demonstration],
            "tools": tools_of(conversation),
        }
        self._episodes[episode] = (lane, conversation, row)
        return found

    def _answer(self, call: int, value: Any) -> None:
        if isinstance(value, BaseException):
            text = str(value) if isinstance(value, NyalaError) else explain(value)
            self._send({"call": call, "error": text, "is_ours": isinstance(value, NyalaError)})
        else:
            self._send({"call": call, "found": value})


def serve(requests: BinaryIO, replies: BinaryIO, *, threads: int) -> None:
    """Answer requests until they end."""
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        try:
            frame = pack_message(message)
        except ValueError as error:
            frame = pack_message({"call": message["call"], "error": str(error), "is_ours": False})
        with lock:
            replies.write(frame)
            replies.flush()

    def beat() -> None:
        while True:
            send({})
            time.sleep(BEAT_S)

    serving = Serving(send, threads=threads)
    threading.Thread(target=beat, daemon=True).start()
    while (request := read_message(requests.read)) is not None:
        serving.take(request)
    sys.stderr.flush()


def _read(read: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, BaseException):
        return value
    try:
        return read(value)
    except Exception as error:  # noqa: BLE001 - a foreign object's attributes
        return error


def _shown(conversation: Any) -> dict[str, Any]:
    return {"answer": conversation.answer, "columns": columns_of(conversation)}


def _stepped(step: Any) -> dict[str, Any]:
    return {"observation": step.observation, "done": bool(step.done)}


def _scored(conversation: Any, row: GivenRow | None, score: Any) -> dict[str, Any]:
    return _shown(conversation) | {
        "reward": float(score.reward),
        "parts": {name: float(part) for name, part in score.parts.items()},
        "metrics": {name: float(metric) for name, metric in score.metrics.items()},
        "is_of_row": row is not None and row.is_asked,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
