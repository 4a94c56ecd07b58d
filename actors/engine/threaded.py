"""Engine made of a stepper and a thread that owns it; the event loop never waits for a step.

`ThreadedEngine` is the whole `Engine` protocol over a `Stepper`, which has no threads of its own.
Commands reach the thread through one queue and are executed between two steps, in order; without
work the thread sleeps on that queue. Tokens come back by one `call_soon_threadsafe` per
hand-over.

Waits: `deltas` for tokens (until cancelled), `apply` and `probe` for their turn (with a deadline).
The death of the thread unblocks all of them with `EngineError`.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import structlog

from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, EngineError, SettingsError
from configs.worker import Worker

from .engine import INITIAL_VERSION, Delta, Request, Sampled, StagedWeights, Stepper
from .stop_strings import TurnWatch
from .token_versions import DeltaInbox, RequestTable

T = TypeVar("T")


class ThreadedEngine:
    """The `Engine` protocol over a stepper.

    Example:
        engine = vllm_engine("runs/x/init", max_model_len=256)
        await engine.start()
        engine.submit([request])
        for delta in await engine.deltas():
            ...
        pause_s = await engine.apply(staged)
        await engine.close()
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        max_model_len: int,
        version: PolicyVersion = INITIAL_VERSION,
        start_timeout_s: float = 600.0,
        command_timeout_s: float = 120.0,
    ) -> None:
        """Prepare; nothing is loaded before `start`.

        Args:
            stepper: Used from the engine's thread only.
            max_model_len: Longest prompt and completion together, tokens.
            version: Of the weights that the stepper starts with.
            start_timeout_s: Deadline of `start`; a first start may compile kernels.
            command_timeout_s: Deadline of `apply`, `probe` and `close`.
        """
        self._stepper = stepper
        self._max_model_len = max_model_len
        self._version = version
        self._start_timeout_s = start_timeout_s
        self._command_timeout_s = command_timeout_s
        # Loop side.
        self._inbox = DeltaInbox()
        self._arrived = asyncio.Event()
        self._next_key = 0
        self._error: EngineError | None = None
        self._unanswered: set[Future[Any]] = set()
        # Thread side.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._table = RequestTable()
        self._probes: dict[int, Future[tuple[float, ...]]] = {}
        self._closing = False
        self._thread: Worker | None = None

    @property
    def version(self) -> PolicyVersion:
        """The policy version that the next token will be sampled from."""
        return self._version

    async def start(self) -> None:
        """Load the model in the engine's thread.

        Raises:
            EngineError: the model cannot be loaded.
            DeadlineError: it took longer than `start_timeout_s`.
        """
        assert self._thread is None, "an engine starts once"
        started: Future[None] = Future()
        loop = asyncio.get_running_loop()
        self._thread = Worker(partial(self._run, loop, started), name="engine").start()
        await self._within(started, self._start_timeout_s, "start")

    def submit(self, requests: list[Request]) -> None:
        """Begin these requests; one that the model cannot serve ends with a refusal.

        Raises:
            EngineError: the engine died.
        """
        self._check_alive()
        for request in requests:
            key = self._new_key()
            superseded = self._inbox.drop(request.request_id)
            if superseded is not None:
                self._commands.put(partial(self._cancel, [superseded]))
            self._inbox.expect(key, request.request_id)
            self._commands.put(partial(self._admit, key, request))

    def abort(self, request_ids: list[str]) -> None:
        """Stop these requests; not one of their tokens arrives any more."""
        keys = [key for id_ in request_ids if (key := self._inbox.drop(id_)) is not None]
        if keys:
            self._commands.put(partial(self._cancel, keys))

    async def halt(self) -> list[Delta]:
        """Stop all requests and return the tokens that are not handed over yet.

        Raises:
            EngineError: the engine died.
        """
        self._check_alive()
        last: Future[list[tuple[int, Delta]]] = Future()
        self._commands.put(partial(self._halt, last))
        self._inbox.put(await self._within(last, self._command_timeout_s, "halt"))
        deltas = self._inbox.take()
        self._inbox.drop_all()
        return deltas

    async def deltas(self) -> list[Delta]:
        """Wait for tokens and return all that came.

        Raises:
            EngineError: the engine died; what came before was returned by earlier calls.
        """
        while not self._inbox:
            self._check_alive()
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.take()

    async def apply(self, staged: StagedWeights) -> float:
        """Swap the weights between two steps; return how long generation stood still, seconds.

        One at a time: the next swap would be prepared over one that is not loaded yet.

        Raises:
            WeightsError: the file is not a version of this model; the old weights go on.
            EngineError: the swap failed half-way, or the engine died.
        """
        self._check_alive()
        await asyncio.to_thread(self._stepper.prepare, staged)
        self._check_alive()
        pause: Future[float] = Future()
        self._commands.put(partial(self._apply, staged, pause))
        return await self._within(pause, self._command_timeout_s, "apply weights")

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return log-probs of tokens 1.. under the weights of this moment, nats, at temperature 1.

        Raises:
            SettingsError: the sequence does not fit into the model's length.
            EngineError: the engine died.
        """
        self._check_alive()
        if not 2 <= len(token_ids) < self._max_model_len:
            raise SettingsError(
                f"a probe must hold 2 to {self._max_model_len - 1} tokens, got {len(token_ids)}; "
                "raise actors.max_model_len"
            )
        answer: Future[tuple[float, ...]] = Future()
        self._commands.put(partial(self._probe, self._new_key(), token_ids, answer))
        return await self._within(answer, self._command_timeout_s, "probe")

    async def close(self) -> None:
        """Stop the thread and free the model."""
        if self._thread is None or not self._thread.is_alive:
            return
        self._commands.put(self._close)
        await asyncio.to_thread(self._thread.join, self._command_timeout_s)
        if self._thread.is_alive:
            raise DeadlineError(
                f"the engine must stop within {self._command_timeout_s} s, got no end of its step; "
                "kill the process"
            )

    # Loop side.

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    async def _within(self, future: Future[T], seconds: float, what: str) -> T:
        self._unanswered.add(future)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(
                f"the engine must {what} within {seconds} s, got no answer; restart the actor"
            ) from error
        finally:
            self._unanswered.discard(future)

    def _deliver(self, deltas: list[tuple[int, Delta]]) -> None:
        self._inbox.put(deltas)
        self._arrived.set()

    def _die(self, error: EngineError) -> None:
        self._error = error
        self._arrived.set()
        for future in self._unanswered:
            if not future.done():
                future.set_exception(error)

    # Thread side.

    def _run(self, loop: asyncio.AbstractEventLoop, started: Future[None]) -> None:
        try:
            self._stepper.start()
            started.set_result(None)
            self._serve(loop)
        except BaseException as error:  # noqa: BLE001 - `_die` raises it where the loop waits
            structlog.get_logger().exception("engine died")
            death = EngineError(f"the engine died: {error!r}; restart the actor")
            death.__cause__ = error
        else:
            death = EngineError("the engine must be open, got a call after close; start another")
        try:
            self._stepper.close()
        except Exception:  # noqa: BLE001 - of an engine that may be dead; the loop must hear of it
            structlog.get_logger().exception("engine did not close")
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._die, death)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing:
            self._execute_commands()
            if self._stepper.has_work and not self._closing:
                self._record(self._stepper.step())
            due = self._table.take(time.monotonic())
            if due:
                loop.call_soon_threadsafe(self._deliver, due)

    def _record(self, made: Iterable[Sampled]) -> None:
        ended: list[int] = []
        for sampled in made:
            if sampled.key in self._probes:
                self._probes.pop(sampled.key).set_result(tuple(sampled.logprobs))
            elif self._table.record(*sampled, self._version):
                ended.append(sampled.key)
        if ended:
            self._stepper.cancel(ended)

    def _execute_commands(self) -> None:
        if not self._stepper.has_work:
            self._commands.get()()
        while not self._closing:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _admit(self, key: int, request: Request) -> None:
        stops = request.stop_strings
        watch = None if stops is None else TurnWatch(stops, request.turn)
        self._table.begin(key, request.request_id, watch)
        room = self._max_model_len - len(request.token_ids)
        try:
            request.check(vocabulary=self._stepper.vocabulary, room=room)
            self._stepper.admit(key, request, min(request.max_tokens, room))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            # What a request can be at fault for; of a model that is broken, the thread dies.
            structlog.get_logger().warning("request refused", request=request.request_id)
            self._stepper.cancel([key])
            self._table.refuse(key, str(error))

    def _cancel(self, keys: list[int]) -> None:
        running = [key for key in keys if key in self._table]
        for key in running:
            self._table.forget(key)
        self._stepper.cancel(running)

    def _halt(self, last: Future[list[tuple[int, Delta]]]) -> None:
        self._record(self._stepper.pause())
        self._stepper.resume()
        self._stepper.cancel(self._table.keys())
        last.set_result(self._table.close())

    def _apply(self, staged: StagedWeights, pause: Future[float]) -> None:
        begun = time.monotonic()
        self._record(self._stepper.pause())
        self._stepper.load(staged)  # an error leaves a mixture of weights: the thread dies of it
        self._version = staged.manifest.version
        self._stepper.resume()
        pause.set_result(time.monotonic() - begun)

    def _probe(
        self, key: int, token_ids: tuple[int, ...], answer: Future[tuple[float, ...]]
    ) -> None:
        self._probes[key] = answer
        self._stepper.begin_probe(key, token_ids)

    def _close(self) -> None:
        self._closing = True
