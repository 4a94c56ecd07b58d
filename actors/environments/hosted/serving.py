"""Requests to an environment host, and the episodes that it has under way.

    {"call": 1, "do": "open", ...}     makes the environment
    {"call": 2, "do": "begin", ...}    prompt, answer, demonstration, columns, tools
    {"call": 3, "do": "step", ...}     observation, done
    {"call": 4, "do": "score", ...}    reward, parts, metrics; answer and columns once more
    {"do": "leave", ...}               the actor has dropped an episode

Each call is answered by `{"call": n, "found": {...}}` or `{"call": n, "error": "..."}`, in any
order; a frame without a call says that the host is alive. This module imports no package.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from typing import Any, BinaryIO

from actors.environments.adapters.forms import adapt, over_rows
from actors.environments.base import Environment, Score, Segment, Step, columns_of, tools_of
from actors.environments.calls import (
    EnvironmentCall,
    EnvironmentLane,
    EnvironmentLanes,
    LaneThread,
    overdue,
)
from configs.child import MalformedFrame, as_frame, read_frame
from configs.errors import DeadlineError, NyalaError
from configs.machine import installed_version
from configs.user_code import explain, load_user_code

# --------------------------------------------------------------------------------------------------
# Messages between an actor and an environment host: frames of JSON.
#
# The user's code may have written to the same pipe, so each side checks what it reads. The format
# is JSON, because the host's Python need not have a package for another one.

MAX_FRAME_BYTES = 16 * 2**20  # a prompt with the columns of its row


def pack_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        ValueError: The message is too long, or has values that are no plain data.
    """
    try:
        body = json.dumps(message, default=_plain).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(
            f"the values of an environment must be plain data, got: {error}; let its class return "
            "texts, numbers, lists and maps"
        ) from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message of an environment must be at most {MAX_FRAME_BYTES:,} bytes, "
            f"got {len(body):,}; let its class return less text, or fewer columns"
        )
    return as_frame(body)


def read_message(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """Return the next message; None = the other side has ended.

    Raises:
        MalformedFrame: The bytes are no message.
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
    """Return numbers and arrays of numpy or torch as Python's, and any other value as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# --------------------------------------------------------------------------------------------------
# Requests to an environment host, and the episodes that it has under way.

BEAT_S = 1.0
TICK_S = 0.05  # between looks at calls that take long
HUNG = 78
"""Exit status of a host that has too many calls without an end."""
FORGOTTEN = "the episode must be under way in this host, got an unknown one; begin it again"


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
    """Rows from the requests, each in the thread that begins its episode."""

    row: GivenRow

    def begin(self, index: int, seed: int, *, held_out: bool) -> GivenRow:  # noqa: ARG002 - the actor chose
        """Return the row of this thread's request."""
        return self.row

    def describe(self) -> str:
        """Return a constant: the actor describes its rows."""
        return "rows"


class Serving:
    """Answers requests; `send` may be called from any thread."""

    def __init__(self, send: Callable[[dict[str, Any]], None], *, threads: int) -> None:
        self._send = send
        self._threads = threads
        self._rows = GivenRows()
        self._loop = asyncio.new_event_loop()
        self._lanes: EnvironmentLanes
        self._episodes: dict[int, tuple[EnvironmentLane, Any, GivenRow | None]] = {}

    def accept_request(self, request: dict[str, Any]) -> None:
        """Accept a request, which is answered now or later; `leave` gets no answer."""
        if request["do"] == "leave":
            self._episodes.pop(request["episode"], None)
            return
        answer = partial(self._answer, request["call"])
        try:
            if request["do"] == "versions":
                answer({name: installed_version(name) for name in request["packages"]})
            elif request["do"] == "open":
                answer(self._open(**request["given"]))
            else:
                self._put_call(request, answer)
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
        factory = load_user_code(name, setting=setting, kind="class")
        make: Callable[[], Environment]
        if plays_rows:
            make = partial(over_rows, self._rows, factory, settings, needs_reward=needs_reward)
        else:
            bare = partial(factory, **settings)
            make = lambda: adapt(bare(), bare, name=name, needs_reward=needs_reward)  # noqa: E731
        first = make()
        another: Callable[[], Environment] = getattr(first, "another", make)
        self._lanes = EnvironmentLanes(
            another,
            num_threads=self._threads,
            is_shared=bool(getattr(first, "is_thread_safe", False)),
            first=first,
        )
        for forever in (self._loop.run_forever, self._watch):
            threading.Thread(target=forever, daemon=True).start()
        return {"description": first.describe(), "can_replay": getattr(first, "can_replay", True)}

    def _put_call(self, request: dict[str, Any], answer: Callable[[Any], None]) -> None:
        if request["do"] == "begin":
            row = None if request["row"] is None else GivenRow(request["row"])
            lane = self._lanes.next_lane()
            work: Callable[[LaneThread], Any] = partial(self._begin, request, row)
            read: Callable[[Any], Any] = partial(self._keep_episode, request["episode"], lane, row)
        else:
            if request["episode"] not in self._episodes:
                raise LookupError(FORGOTTEN)
            lane, conversation, row = self._episodes[request["episode"]]
            if request["do"] == "step":
                work, read = (lambda _: conversation.step(request["text"])), _step_fields
            else:
                work, read = (
                    (lambda _: conversation.score()),
                    partial(_score_fields, conversation, row),
                )
        limit_s = request["limit_s"]

        def done(value: Any) -> None:
            if isawaitable(value):
                waiting = _await_within(
                    value, limit_s, lambda result: answer(_read_result(read, result))
                )
                asyncio.run_coroutine_threadsafe(waiting, self._loop)
            else:
                answer(_read_result(read, value))

        self._lanes.put_call(EnvironmentCall(work, done, limit_s), lane)

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_S)
            try:
                self._lanes.watch()
            except DeadlineError:
                os._exit(HUNG)

    def _begin(self, request: dict[str, Any], row: GivenRow | None, thread: LaneThread) -> Any:
        if row is not None:
            self._rows.row = row
        index, seed = request["index"], request["seed"]
        return thread.environment.begin(index, seed, held_out=request["held_out"])

    def _keep_episode(
        self, episode: int, lane: EnvironmentLane, row: GivenRow | None, conversation: Any
    ) -> dict[str, Any]:
        reply = _answer_and_columns(conversation) | {
            "prompt": conversation.prompt,
            "demonstration": [list(segment) for segment in conversation.demonstration],
            "tools": tools_of(conversation),
        }
        self._episodes[episode] = (lane, conversation, row)
        return reply

    def _answer(self, call: int, value: Any) -> None:
        if isinstance(value, BaseException):
            text = str(value) if isinstance(value, NyalaError) else explain(value)
            self._send({"call": call, "error": text, "is_ours": isinstance(value, NyalaError)})
        else:
            self._send({"call": call, "found": value})


def serve(requests: BinaryIO, replies: BinaryIO, *, threads: int) -> None:
    """Answer requests until they end, and send a sign of life every second.

    The process ends itself with status `HUNG` when too many calls never end.
    """
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
        serving.accept_request(request)
    sys.stderr.flush()


async def _await_within(value: Any, limit_s: float, done: Callable[[Any], None]) -> None:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            result = await value
    except BaseException as error:  # noqa: BLE001 - foreign code; the actor judges
        result = overdue(limit_s, "") if limit.expired() else error
    done(result)


def _read_result(read: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, BaseException):
        return value
    try:
        return read(value)
    except Exception as error:  # noqa: BLE001 - a foreign object's attributes
        return error


def _answer_and_columns(conversation: Any) -> dict[str, Any]:
    return {"answer": conversation.answer, "columns": columns_of(conversation)}


def _step_fields(step: Any) -> dict[str, Any]:
    return {"observation": step.observation, "done": bool(step.done)}


def _score_fields(conversation: Any, row: GivenRow | None, score: Any) -> dict[str, Any]:
    return _answer_and_columns(conversation) | {
        "reward": float(score.reward),
        "parts": {name: float(part) for name, part in score.parts.items()},
        "metrics": {name: float(metric) for name, metric in score.metrics.items()},
        "is_of_row": row is not None and row.is_asked,
    }
