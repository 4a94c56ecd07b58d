"""The actor's side of one reward worker: time limits, restarts and retries.

The worker may hang, crash or run out of its memory. It is then killed and started again. Only the
sample that it was called with fails: the samples of a batch are tried again one by one, to find it.
A group that is judged together fails together. A failed sample is tried again after a pause, on the
new worker, before it counts as a sample without a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from configs.errors import DeadlineError, RewardError, SettingsError

from .channel import Channel, start_worker
from .frames import Loaded, MalformedReply, Refused, Reply, RewardOutcomes
from .functions import Convention, RewardSample
from .worker import OUT_OF_MEMORY

log = structlog.get_logger()

LOAD_TIMEOUT_S = 60.0  # a reward file may import torch
KILL_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 0.5  # for services that a reward calls over the network; jittered
PATIENCE = 4  # samples of one batch that may hang before the rest of it is given up

Result = float | RewardError | None
"""A reward, the error of a missing one, or None: the function does not count for this sample."""


class WorkerExit(NamedTuple):
    """The end of a worker."""

    reason: str
    hung: bool


class RewardProcess:
    """Scores samples with one function of the user, one batch at a time.

    Args:
        reward: The function, `path.py:function` or `module:function`.
        timeout_s: Longest wait for the next answer of a batch; the worker is killed after it.
        memory_mb: Memory that the worker may allocate, MiB; None = no limit.
        retries: Further tries of a sample without a reward.

    Example:
        rewards = RewardProcess("rewards/length.py:reward", timeout_s=30)
        convention = await rewards.start()
        results = await rewards.score(samples)
        await rewards.close()
    """

    def __init__(
        self, reward: str, *, timeout_s: float, memory_mb: int | None = None, retries: int = 0
    ) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._retries = retries
        self._process: Process | None = None
        self._channel: Channel
        self._num_answers = 0
        self._convention = Convention.SAMPLE
        self._one_at_a_time = asyncio.Lock()
        self._gave_up = False
        self._has_started = False
        self.num_restarts = 0

    async def start(self) -> Convention:
        """Start the worker and load the function.

        Raises:
            SettingsError: The function cannot be loaded or has unknown parameters.
            RewardError: Loading it crashed or took too long.
        """
        self._channel = Channel()
        self._num_answers = 0
        command = (sys.executable, "-P", "-m", "actors.rewards.worker")
        try:
            self._process = await start_worker(
                self._channel, *command, self._reward, str(self._memory_mb or 0)
            )
        except OSError as error:
            raise RewardError(
                f"the worker of run.reward = {self._reward!r} must start, got: {error}; look at "
                "the memory and the processes of this machine"
            ) from error
        try:
            reply = await self._channel.receive(LOAD_TIMEOUT_S)
        except MalformedReply:
            reply = None
        if isinstance(reply, Refused):
            await self._kill()
            raise SettingsError(reply.reason)
        if not isinstance(reply, Loaded):
            await self._kill()
            raise RewardError(
                f"run.reward must load within {LOAD_TIMEOUT_S:g} s, got a crash or a timeout from "
                f"{self._reward!r}; import its file with python to see why"
            )
        self._convention = reply.convention
        self._has_started = True
        return self._convention

    async def score(self, samples: Sequence[RewardSample]) -> list[Result]:
        """Return for each sample its reward, or the error of a missing one, in order.

        Starts the worker where it does not run; a function that cannot be loaded gives errors.
        """
        async with self._one_at_a_time:
            results = await self._score(samples)
            for _ in range(self._retries):
                failed = [i for i, result in enumerate(results) if isinstance(result, RewardError)]
                if not failed or self._gave_up:
                    break
                if self._convention is Convention.GROUP:
                    failed = list(range(len(samples)))
                await asyncio.sleep(RETRY_PAUSE_S * random.uniform(0.5, 1.5))
                again = await self._score([samples[i] for i in failed])
                for i, result in zip(failed, again, strict=True):
                    results[i] = result
            return results

    async def close(self) -> None:
        """Kill the worker process, and what it has started."""
        await self._kill()

    async def _score(self, samples: Sequence[RewardSample]) -> list[Result]:
        results: list[Result] = []
        batch, num_hangs, self._gave_up = len(samples), 0, False
        while len(results) < len(samples):
            if num_hangs >= PATIENCE:
                self._gave_up = True
                error = RewardError(
                    f"run.reward must return within run.reward_timeout_s = {self._timeout_s:g} s, "
                    f"got {num_hangs} calls in one batch that hung, or whose worker did not start "
                    "again; bound the time of a call, or see the errors of the samples before"
                )
                return results + [error] * (len(samples) - len(results))
            part = samples[len(results) : len(results) + batch]
            answers, death = await self._call(part)
            results += answers
            if death is None:
                continue
            num_hangs += death.hung
            if self._convention is Convention.GROUP:
                return [RewardError(death.reason)] * len(samples)
            if len(part) == 1 or self._convention is Convention.SAMPLE:
                results.append(RewardError(death.reason))
            batch = 1 if self._convention is Convention.BATCH else batch
        return results

    async def _call(
        self, samples: Sequence[RewardSample]
    ) -> tuple[list[Result], WorkerExit | None]:
        """Return the outcomes that came, and the end of the worker if some are missing."""
        if self._process is None:
            try:
                await self._restart()
            except (RewardError, SettingsError) as error:  # it loaded before: the sample fails
                return [], WorkerExit(str(error), hung=True)
        answers: list[Result] = []
        try:
            await self._channel.send(list(samples), self._timeout_s)
            while len(answers) < len(samples):
                reply = await self._channel.receive(self._timeout_s)
                if reply is None:
                    return answers, await self._end()
                answers += self._checked(reply, most=len(samples) - len(answers))
        except (ConnectionError, DeadlineError):
            return answers, await self._end()
        except MalformedReply as error:
            await self._kill()
            log.warning("reward worker restarts", reason=str(error))
            return answers, WorkerExit(
                f"the reward wrote into its worker's answers ({error}); let it write to its stdout "
                "or files of its own",
                hung=False,
            )
        except RewardError as error:  # a sample that cannot be sent
            return answers, WorkerExit(str(error), hung=False)
        return answers, None

    def _checked(self, reply: Reply, *, most: int) -> list[Result]:
        """Return the outcomes of a reply.

        Raises:
            MalformedReply: The reply is not for the next samples.
        """
        if (
            not isinstance(reply, RewardOutcomes)
            or reply.number != self._num_answers
            or not 0 < len(reply.outcomes) <= most
        ):
            raise MalformedReply("answers must be to the next samples, got others")
        self._num_answers += len(reply.outcomes)
        return [
            RewardError(reason or "no reason given")
            if reason is not None or (value is not None and not math.isfinite(value))
            else value
            for value, reason in reply.outcomes
        ]

    async def _restart(self) -> None:
        self.num_restarts += self._has_started
        await self.start()

    async def _end(self) -> WorkerExit:
        """Kill the worker and return the reason for its end."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            # A crash closes the pipe a moment before the exit status is known.
            async with asyncio.timeout(0.2):
                await self._process.wait()
        status = self._process.returncode
        await self._kill()
        if status is None:
            reason = (
                f"reward must return within run.reward_timeout_s = {self._timeout_s:g} s, got no "
                "answer; raise it, or bound the time of a call"
            )
        elif status == OUT_OF_MEMORY:
            reason = (
                f"reward must fit into actors.reward_memory_mb = {self._memory_mb} MiB, got more; "
                "raise it, or let the function keep less"
            )
        else:
            reason = (
                f"reward must return or raise, got the end of its process with status {status}; "
                "call the function by hand to see why"
            )
        log.warning("reward worker restarts", reason=reason)
        return WorkerExit(reason, hung=status is None)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._channel.close()
        with contextlib.suppress(TimeoutError):  # stuck in the kernel: reaped when it gets out
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
