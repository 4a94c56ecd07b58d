"""Engine made of a stepper and a thread that owns it; the event loop never waits for a step.

`ThreadedEngine` is the whole `Engine` protocol over a `Stepper`, which has no threads of its own:
its commands are executed by `EngineThread` between two steps. Tokens come back by one
`call_soon_threadsafe` per hand-over.

Waits: `deltas` for tokens (until cancelled, or until the engine has been silent for too long),
`apply` and `probe` for their turn (with a deadline), the thread for a command or a step. The death
of the thread hands over all tokens that were made, and then unblocks all waits with `EngineError`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, EngineDied, EngineError, SettingsError
from configs.worker import Worker

from .engine import Delta, GenerationRequest, StagedWeights, Stepper
from .engine_thread import DeltaInbox, EngineThread, HandOver
from .waits import LOOK_S, Answers, StallWatch

T = TypeVar("T")

LEAST_BYTES_PER_S = 50e6
"""Least speed of loads and comparisons in other processes: a tenth of what one busy core does."""
PREPARING_S = 0.02
"""Pause between two questions to workers that open a file."""
KILLED_S = 5.0
"""Longest wait for the thread of a killed engine, which first hands its tokens over."""


class ThreadedEngine:
    """The `Engine` protocol over a stepper.

    A command that gets no answer within its limit raises `DeadlineError`. The engine is then killed
    where that is possible, which vLLM in the actor's own process and the torch engine are not.

    Example:
        engine = vllm_engine(VllmOptions("runs/x/init", max_model_len=256))
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
        start_timeout_s: float = 600.0,
        command_timeout_s: float = 120.0,
        stall: StallWatch | None = None,
    ) -> None:
        """Prepare; nothing is loaded before `start`.

        Args:
            stepper: Used from the engine's thread only.
            max_model_len: Longest prompt and completion together, tokens.
            start_timeout_s: Deadline of `start`; a first start may compile kernels.
            command_timeout_s: Deadline of `probe` and `close`. `apply` and `read_back` may take
                minutes: they get this long after each sign of progress, and time for their bytes.
            stall: Decides when an engine with requests has been silent for too long.
        """
        self._stepper = stepper
        self._max_model_len = max_model_len
        self._start_timeout_s = start_timeout_s
        self._command_timeout_s = command_timeout_s
        self._stall = stall or StallWatch()
        self._inside = EngineThread(stepper, max_model_len=max_model_len, stall=self._stall)
        self._commands = self._inside.commands
        self._thread: Worker | None = None
        self._inbox = DeltaInbox()
        self._arrived = asyncio.Event()
        self._answers = Answers(on_late=self._end_hung)
        self._next_key = 0
        self._error: EngineError | None = None
        self._silence: EngineError | None = None
        """Error of an engine that hung and was given up."""
        self._is_swapping = self._hangs = False

    @property
    def version(self) -> PolicyVersion:
        """The policy version that the next token will be sampled from."""
        return self._inside.version

    async def start(self) -> None:
        """Load the model in the engine's thread.

        Raises:
            EngineUnfit: the model cannot be loaded here.
            EngineNotStarted: it could not be loaded this time.
            DeadlineError: it took longer than `start_timeout_s`.
        """
        assert self._thread is None, "an engine starts once"
        started: Future[None] = Future()
        self._thread = self._inside.start(started, on_tokens=self._deliver, on_death=self._die)
        await self._answers.within(started, self._start_timeout_s, "start")

    def submit(self, requests: list[GenerationRequest]) -> None:
        """Begin these requests; one that the model cannot serve ends with a refusal.

        A request takes the place of a running one with the same id.

        Raises:
            EngineError: the engine died.
        """
        self._check_alive()
        for request in requests:
            key = self._new_key()
            superseded = self._inbox.drop(request.request_id)
            if superseded is not None:
                self._commands.put(partial(self._inside.cancel, [superseded]))
            self._inbox.expect(key, request.request_id)
            self._commands.put(partial(self._inside.admit, key, request))

    def abort(self, request_ids: list[str]) -> None:
        """Stop these requests; none of their tokens arrives any more."""
        keys = [key for id_ in request_ids if (key := self._inbox.drop(id_)) is not None]
        if keys:
            self._commands.put(partial(self._inside.cancel, keys))

    async def halt(self) -> list[Delta]:
        """Stop all requests and return the tokens that are not handed over yet.

        Raises:
            EngineError: the engine died.
            DeadlineError: it did not answer within `command_timeout_s`.
        """
        self._check_alive()
        last: Future[HandOver] = Future()
        self._commands.put(partial(self._inside.halt, last))
        self._inbox.put_deltas(await self._answers.within(last, self._command_timeout_s, "halt"))
        deltas = self._inbox.take_deltas()
        self._inbox.drop_all()
        return deltas

    async def deltas(self) -> list[Delta]:
        """Wait for tokens and return all that came.

        Raises:
            EngineDied: the engine died, or hangs; what it made was returned by earlier calls.
            EngineError: the engine was closed.
        """
        while not self._inbox:
            self._check_alive()
            self._arrived.clear()
            await self._wait_for_tokens()
        return self._inbox.take_deltas()

    async def apply(self, staged: StagedWeights) -> float:
        """Swap the weights between two steps; return how long generation stood still, seconds.

        One at a time: the next swap would be prepared over one that is not loaded yet.

        Raises:
            WeightsError: the file is not a version of this model, or was overwritten; the old
                weights go on.
            MixedWeights: it was overwritten while it was loaded; generation stands until the next
                call.
            EngineError: the swap failed half-way, or the engine died.
            DeadlineError: it made no progress within its limit.
        """
        self._check_alive()
        if not await asyncio.to_thread(self._stepper.prepare, staged):
            await self._prepared(staged)
        self._check_alive()
        pause: Future[float] = Future()
        self._commands.put(partial(self._inside.apply, staged, pause))
        return await self._without_tokens(pause, "apply weights", staged)

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return log-probs of tokens 1.. under the weights of this moment, nats, at temperature 1.

        Raises:
            SettingsError: the sequence does not fit into the model's length.
            EngineError: the engine died.
            DeadlineError: it did not answer within `command_timeout_s`.
        """
        self._check_alive()
        if not 2 <= len(token_ids) < self._max_model_len:
            raise SettingsError(
                f"a probe must hold 2 to {self._max_model_len - 1} tokens, got {len(token_ids)}; "
                "set actors.max_model_len above the tokens of a probe"
            )
        answer: Future[tuple[float, ...]] = Future()
        self._commands.put(partial(self._inside.probe, self._new_key(), token_ids, answer))
        return await self._answers.within(answer, self._command_timeout_s, "probe")

    async def read_back(self, staged: StagedWeights) -> list[str] | None:
        """Name parameters whose stored values are not this version's; None = cannot be read.

        No step runs meanwhile.

        Raises:
            WeightsError: the file is gone.
            EngineError: the engine died.
            DeadlineError: it made no progress within its limit.
        """
        self._check_alive()
        answer: Future[list[str] | None] = Future()
        self._commands.put(partial(self._inside.read_back, staged, answer))
        return await self._without_tokens(answer, "read weights back", staged)

    async def close(self) -> None:
        """Stop the thread and free the model; does nothing if it has ended.

        Raises:
            DeadlineError: a step did not end within `command_timeout_s`. An engine that was given
                up before is left behind after 5 s without an error.
        """
        if self._thread is None or not self._thread.is_alive:
            return
        self._commands.put(self._inside.close)
        limit_s = KILLED_S if self._hangs else self._command_timeout_s
        await asyncio.to_thread(self._thread.join, limit_s)
        if self._thread.is_alive and not self._hangs and self._error is None:
            raise DeadlineError(
                f"the engine must stop within {limit_s:g} s, got an unfinished step; kill the "
                "actor's process"
            )

    async def _prepared(self, staged: StagedWeights) -> None:
        """Ask between steps until the swap is prepared or time is up; `load` does what is left."""
        end = time.monotonic() + self._limit_s(staged)
        while time.monotonic() < end:
            self._check_alive()
            answer: Future[bool] = Future()
            self._commands.put(partial(self._inside.prepare, staged, answer))
            if await self._answers.within(answer, self._command_timeout_s, "prepare weights"):
                return
            await asyncio.sleep(PREPARING_S)

    async def _without_tokens(self, answer: Future[T], command: str, staged: StagedWeights) -> T:
        """Wait for a command during which no token is made; the engine is not taken for dead."""
        self._is_swapping = True
        try:
            return await self._answers.within(
                answer, self._limit_s(staged), command, moves=lambda: self._stall.moves
            )
        finally:
            self._is_swapping = self._inside.stands

    def _limit_s(self, staged: StagedWeights) -> float:
        return round(self._command_timeout_s + staged.manifest.num_bytes / LEAST_BYTES_PER_S, 1)

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait_for_tokens(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._arrived.wait()
        except TimeoutError:
            num_wanted = 0 if self._is_swapping else len(self._inbox)
            if self._stall.detect_stall(num_wanted=num_wanted, has_begun=self._inbox.has_begun):
                await self._end_silent()

    async def _end_silent(self) -> None:
        """End an engine that makes nothing; tokens of a killed process are still handed over."""
        self._silence = EngineDied(
            f"the engine must make a token within {self._stall.limit_s:g} s while it has requests, "
            "got none; look for a lost GPU or a full memory in the machine's log"
        )
        self._end_hung()
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join, KILLED_S)
        self._die(self._silence)

    def _end_hung(self) -> None:
        self._hangs = True
        self._stepper.kill()

    def _deliver(self, deltas: HandOver) -> None:
        self._inbox.put_deltas(deltas)
        self._arrived.set()

    def _die(self, error: EngineError) -> None:
        self._error = self._silence or error
        self._arrived.set()
        self._answers.fail(self._error)
