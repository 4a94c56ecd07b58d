"""Thread of an engine: owns the stepper, executes commands between steps, collects tokens.

Commands come through one queue, in order; without work the thread sleeps on it, and looks now and
then whether the model is alive. At its end, all tokens that were made are handed over, and then the
error.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import structlog

from buffer.record.episode import PolicyVersion, VersionSpan
from configs.errors import (
    EngineDied,
    EngineError,
    EngineNotStarted,
    EngineUnfit,
    MixedWeights,
    SettingsError,
    WeightsError,
    WeightsOverwritten,
)
from configs.worker import Worker

from .engine import INITIAL_VERSION, Delta, GenerationRequest, Sampled, StagedWeights, Stepper
from .turns import TurnWatch
from .waits import StallWatch, settle, settle_with_error

# --------------------------------------------------------------------------------------------------
# Tokens of running requests, each with the policy version that sampled it; for all engines.
#
# `RequestTable` belongs to the thread that makes tokens: it labels each token with the version of
# the weights, and decides which tokens are due. `DeltaInbox` belongs to the event loop: it drops
# deltas of aborted requests and joins those of several hand-overs, so it holds at most one delta
# per request, however slow its reader is. Neither has a thread or a clock.
#
# A request is identified by its `key`, a number that is never used twice: an id may be submitted
# again while tokens of the first request are still on their way.


@dataclass(slots=True)
class _PendingTokens:
    """Tokens of one request that are not handed over yet."""

    request_id: str
    watch: TurnWatch | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def flush(self, finish_reason: str | None) -> Delta:
        delta = Delta(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=finish_reason,
        )
        self.token_ids.clear()
        self.logprobs.clear()
        self.versions.clear()
        return delta


class RequestTable:
    """Tokens made and not yet handed over.

    A finished request is due at once; running ones together, every `interval_s`.
    """

    def __init__(self, *, interval_s: float = 0.25) -> None:
        self._interval_s = interval_s
        self._handed_over_at = float("-inf")
        self._pending: dict[int, _PendingTokens] = {}
        self._finished: list[tuple[int, Delta]] = []

    def __contains__(self, key: int) -> bool:
        return key in self._pending

    def add_request(self, key: int, request_id: str, watch: TurnWatch | None = None) -> None:
        """Begin to collect the tokens of a request, until `watch` finds the end of its turn."""
        self._pending[key] = _PendingTokens(request_id, watch)

    def forget(self, key: int) -> None:
        """Drop a request without a delta."""
        self._pending.pop(key, None)

    def refuse(self, key: int, why: str) -> None:
        """End a request that cannot be served; no token was sampled for it."""
        pending = self._pending.pop(key)
        self._finished.append((key, Delta(pending.request_id, (), (), (), "refused", why)))

    def record(self, sampled: Sampled, version: PolicyVersion) -> bool:
        """Add tokens sampled from `version`; unknown keys (aborted meanwhile) are ignored.

        Returns:
            Whether a string ended the turn while its stepper still goes on.
        """
        key, token_ids, logprobs, finish_reason = sampled
        pending = self._pending.get(key)
        if pending is None:
            return False
        goes_on = False
        if pending.watch is not None and token_ids:
            end = pending.watch.scan_tokens(token_ids)
            if end is not None:
                goes_on = finish_reason is None
                token_ids, logprobs, finish_reason = token_ids[:end], logprobs[:end], "stop"
        versions = pending.versions
        if token_ids and (not versions or versions[-1].version != version):
            versions.append(VersionSpan(version, len(pending.token_ids)))
        pending.token_ids += token_ids
        pending.logprobs += logprobs
        if finish_reason is not None:
            self._finished.append((key, pending.flush(finish_reason)))
            del self._pending[key]
        return goes_on

    def take_due_deltas(self, now: float) -> list[tuple[int, Delta]]:
        """Return the deltas that are due at `now` (monotonic seconds)."""
        due, self._finished = self._finished, []
        if now - self._handed_over_at >= self._interval_s:
            self._handed_over_at = now
            due += [(key, p.flush(None)) for key, p in self._pending.items() if p.token_ids]
        return due

    def keys(self) -> list[int]:
        """Return the keys of running requests."""
        return list(self._pending)

    def close(self) -> list[tuple[int, Delta]]:
        """Drop all requests; return the tokens that were not handed over."""
        rest = self._finished + [
            (k, p.flush(None)) for k, p in self._pending.items() if p.token_ids
        ]
        self._finished = []
        self._pending.clear()
        return rest


class DeltaInbox:
    """Deltas that wait for the reader, and the requests that it still wants."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._begun: set[int] = set()
        self._waiting: dict[int, Delta] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        """Count the requests that are wanted and have not ended."""
        return len(self._keys)

    @property
    def has_begun(self) -> bool:
        """Whether a wanted request has had a token."""
        return bool(self._begun)

    def expect(self, key: int, request_id: str) -> None:
        """Accept deltas of this request from now on, and drop those of an earlier one of its id."""
        self.drop(request_id)
        self._keys[request_id] = key

    def drop(self, request_id: str) -> int | None:
        """Stop wanting a request; return its key, or None if it is unknown or has ended."""
        key = self._keys.pop(request_id, None)
        if key is not None:
            self._waiting.pop(key, None)
            self._begun.discard(key)
        return key

    def drop_all(self) -> None:
        """Stop wanting any request."""
        self._keys.clear()
        self._begun.clear()
        self._waiting.clear()

    def put_deltas(self, deltas: list[tuple[int, Delta]]) -> None:
        """Add deltas that the engine's thread hands over; unwanted requests are left out."""
        for key, delta in deltas:
            if self._keys.get(delta.request_id) != key:
                continue
            self._begun.add(key)
            earlier = self._waiting.get(key)
            self._waiting[key] = delta if earlier is None else _join(earlier, delta)

    def take_deltas(self) -> list[Delta]:
        """Return all that waits, at most one delta for each request."""
        deltas = list(self._waiting.values())
        self._waiting.clear()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._begun.discard(self._keys.pop(delta.request_id))
        return deltas


def _join(first: Delta, second: Delta) -> Delta:
    offset = len(first.token_ids)
    spans = [VersionSpan(span.version, span.start + offset) for span in second.versions]
    if spans and first.versions and spans[0].version == first.versions[-1].version:
        del spans[0]
    return Delta(
        request_id=first.request_id,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=first.versions + tuple(spans),
        finish_reason=second.finish_reason,
        refusal=second.refusal,
    )


# --------------------------------------------------------------------------------------------------
# Thread of an engine: owns the stepper, executes commands between steps, collects tokens.

IDLE_LOOK_S = 1.0
"""Pause between two checks of a model without requests: its process may die meanwhile."""

LASTING = (ImportError, AttributeError, NotImplementedError, TypeError, ValueError)
"""Kinds of errors of a start that another start would meet again."""
LASTING_TEXT = re.compile(
    r"cannot open shared object file|NVIDIA driver|CUDA driver|no kernel image"
    r"|No working C\+\+ compiler|C\+\+ compile error|Failed to find C compiler"
)
"""Texts of lasting faults that libraries raise as errors of other kinds."""
BROKEN_FILE = (json.JSONDecodeError, UnicodeDecodeError)
"""Kinds of `ValueError` that a half-written file causes."""
PASSING_TEXT = re.compile(r"[Ff]ree memory|[Cc]onnect|[Tt]imed? ?out|HTTPError|temporarily")
"""Texts of errors while the process before still holds the card, or a hub cannot be reached."""
SHOWN = 700
"""Characters of an error that are shown."""

HandOver = list[tuple[int, Delta]]


class EngineThread:
    """A stepper and its thread; all methods but `start` are commands, which the thread executes.

    Args:
        stepper: Used from this thread only.
        max_model_len: Longest prompt and completion together, tokens.
        stall: Notes every sign of life.
    """

    def __init__(self, stepper: Stepper, *, max_model_len: int, stall: StallWatch) -> None:
        self._stepper = stepper
        self._max_model_len = max_model_len
        self._stall = stall
        self._table = RequestTable()
        self._probes: dict[int, Future[tuple[float, ...]]] = {}
        self._closing = False
        self._stood_since: float | None = None
        """Since when generation stands because the weights are a mixture; None = it goes on."""
        self.version = INITIAL_VERSION
        """Version of the weights that the next token will be sampled from."""
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    @property
    def stands(self) -> bool:
        """Whether no token is made until whole weights are loaded."""
        return self._stood_since is not None

    def start(
        self,
        started: Future[None],
        *,
        on_tokens: Callable[[HandOver], None],
        on_death: Callable[[EngineError], None],
    ) -> Worker:
        """Load the model in a new thread, and serve.

        Args:
            started: Gets its result when the model is loaded; an error comes through `on_death`.
            on_tokens: Called on the running event loop with the tokens that are due.
            on_death: Called on that loop once, when the thread ends: after `close`, too.
        """
        loop = asyncio.get_running_loop()
        run = partial(self._run, loop, started, on_tokens, on_death)
        return Worker(run, name="engine").start()

    def admit(self, key: int, request: GenerationRequest) -> None:
        """Begin a request, or refuse it."""
        stops = request.stop_strings
        watch = None if stops is None else TurnWatch(stops, request.turn)
        self._table.add_request(key, request.request_id, watch)
        room = self._max_model_len - len(request.token_ids)
        try:
            request.check_limits(vocabulary=self._stepper.vocabulary, room=room)
            self._stepper.admit(key, request, min(request.max_tokens, room))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            # Errors that a request can cause. A broken model raises others, and ends the thread.
            structlog.get_logger().warning(
                "request refused", request=request.request_id, reason=str(error)
            )
            self._stepper.cancel([key])
            self._table.refuse(key, str(error))

    def cancel(self, keys: list[int]) -> None:
        """Drop requests; unknown keys are ignored."""
        running = [key for key in keys if key in self._table]
        for key in running:
            self._table.forget(key)
        self._stepper.cancel(running)

    def halt(self, last: Future[HandOver]) -> None:
        """Drop all requests; answer with their last tokens."""
        if not self.stands:
            self._record(self._stepper.pause())
            self._stepper.resume()
        self._stepper.cancel(self._table.keys())
        settle(last, self._table.close())

    def prepare(self, staged: StagedWeights, answer: Future[bool]) -> None:
        """Answer whether a swap is prepared."""
        try:
            settle(answer, self._stepper.is_prepared(staged))
        except WeightsError as error:
            settle_with_error(answer, error)

    def apply(self, staged: StagedWeights, pause: Future[float]) -> None:
        """Swap to prepared weights; answer with the pause."""
        begun = time.monotonic() if self._stood_since is None else self._stood_since
        if not self.stands:
            self._record(self._stepper.pause())
        try:
            self._stepper.load(staged)  # another error: what is loaded is unknown, the thread dies
        except WeightsOverwritten as error:
            self._stood_since = begun
            settle_with_error(pause, MixedWeights(str(error)))
            return
        self._stood_since = None
        self.version = staged.manifest.version
        self._stepper.resume()
        self._stall.moved()
        settle(pause, time.monotonic() - begun)

    def read_back(self, staged: StagedWeights, answer: Future[list[str] | None]) -> None:
        """Compare what the model has stored with a version."""
        try:
            stale = self._stepper.read_back(staged, self._stall.moved)
        except WeightsError as error:  # of the file alone, which may be gone; the model is whole
            settle_with_error(answer, error)
        else:
            settle(answer, stale)
        self._stall.moved()

    def probe(
        self, key: int, token_ids: tuple[int, ...], answer: Future[tuple[float, ...]]
    ) -> None:
        """Begin to score a sequence; a later step answers."""
        largest, vocabulary = max(token_ids), self._stepper.vocabulary
        if largest >= vocabulary:  # it would end the whole engine
            error = SettingsError(
                f"token ids of a probe must be below the model's vocabulary = {vocabulary}, got "
                f"{largest}; score with a model of the same tokenizer"
            )
            settle_with_error(answer, error)
            return
        self._probes[key] = answer
        self._stepper.begin_probe(key, token_ids)

    def close(self) -> None:
        """End after this command."""
        self._closing = True

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        started: Future[None],
        on_tokens: Callable[[HandOver], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        death: EngineError
        try:
            self._stepper.start()
            settle(started, None)
            self._serve(lambda due: loop.call_soon_threadsafe(on_tokens, due))
        except BaseException as error:  # noqa: BLE001 - raised where the loop waits
            if started.cancelled():
                structlog.get_logger().info(
                    "the start of the engine was cancelled", reason=repr(error)
                )
            else:
                structlog.get_logger().exception("engine died")
            death = self._death(error, is_start=not started.done())
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_tokens, self._rest())
        else:
            death = EngineError("the engine must be open, got a call after close; start another")
        if not loop.is_closed():
            # Not behind `close`: work is given back first, and a dead process takes its time.
            loop.call_soon_threadsafe(on_death, death)
        try:
            self._stepper.close()
        except Exception:  # noqa: BLE001 - of an engine that may be dead
            structlog.get_logger().exception("engine did not close")

    def _death(self, error: BaseException, *, is_start: bool) -> EngineError:
        try:
            self._stepper.check_health()
        except EngineDied as death_of_process:  # says more than what the step raised
            if not is_start:
                return death_of_process
            error = death_of_process
        if is_start:
            death = not_started(error)
        else:
            death = EngineDied(f"the engine died: {error!r}; restart the actor")
        death.__cause__ = error
        return death

    def _rest(self) -> HandOver:
        """Collect every token that was made and not handed over."""
        try:
            self._record(self._stepper.rest())
        except Exception:  # noqa: BLE001 - of a dead engine; what came before is whole
            structlog.get_logger().exception("tokens of the dead engine are lost")
        return self._table.close()

    def _serve(self, hand_over: Callable[[HandOver], object]) -> None:
        while not self._closing:
            self._execute_commands()
            if self._has_work and not self._closing:
                self._record(self._stepper.step())
            due = self._table.take_due_deltas(time.monotonic())
            if due:
                hand_over(due)

    def _record(self, outputs: Iterable[Sampled]) -> None:
        ended: list[int] = []
        has_moved = False
        table, probes, version = self._table, self._probes, self.version
        for sampled in outputs:
            has_moved = True
            if sampled.key in probes:
                settle(probes.pop(sampled.key), tuple(sampled.logprobs))
            elif table.record(sampled, version):
                ended.append(sampled.key)
        if has_moved:
            self._stall.moved()
        if ended:
            self._stepper.cancel(ended)

    def _execute_commands(self) -> None:
        if not self._has_work and not self._next_command():
            return
        while not self._closing:
            try:
                command = self.commands.get_nowait()
            except queue.Empty:
                return
            command()

    @property
    def _has_work(self) -> bool:
        return self._stepper.has_work and not self.stands

    def _next_command(self) -> bool:
        """Execute the next command; without one for a while, look whether the model is alive."""
        try:
            command = self.commands.get(timeout=IDLE_LOOK_S)
        except queue.Empty:
            self._stepper.check_health()
            return False
        command()
        return True


def not_started(error: BaseException) -> EngineError:
    """Make the error of an engine that could not start; its kind says whether to try again."""
    if isinstance(error, EngineError) and not isinstance(error, EngineDied):
        return error
    whole = " ".join(repr(error).split())
    text = whole[:SHOWN]
    if PASSING_TEXT.search(whole):
        return EngineError(
            f"the engine must start, got: {text}; start the actor again later, as this may pass"
        )
    is_lasting = isinstance(error, LASTING) and not isinstance(error, BROKEN_FILE)
    if is_lasting or LASTING_TEXT.search(whole):
        return EngineUnfit(
            f"the engine must be able to start with this model on this machine, got: {text}; "
            "mend what this error names, and run `nyala doctor`, which checks the machine"
        )
    return EngineNotStarted(
        f"the engine must start, got: {text}; read the lines before this one in the actor's log"
    )
