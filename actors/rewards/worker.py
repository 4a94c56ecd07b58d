"""Process of a user's reward function: `python -m actors.rewards.worker path.py:function MiB FD`.

    READY --samples--> CALLING --an outcome for each sample, in order--> READY
    end of input -> exit

`process.py` starts it. A batched function that raises is called again with one sample at a time,
and a message says so, so that only the sample at fault fails; a function that judges whole groups
fails the group. A function that runs out of memory ends the process: objects that it keeps alive
would fail every later call. Coroutines of one request run together in one event loop, which lives
as long as the process and also runs between requests: limits, clients and tasks of an `async`
function outlive a call. Requests and replies have a socket of their own, far from the descriptors
of the function, which its child processes do not inherit. The process dies with its parent.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

from configs.child import die_with_parent, read_frame
from configs.errors import RewardError, SettingsError, quoted
from configs.user_code import explain

from .frames import (
    Loaded,
    Refused,
    Reply,
    RewardOutcome,
    RewardOutcomes,
    pack_frame,
    unpack_samples,
)
from .functions import (
    Convention,
    RewardFunction,
    RewardSample,
    call_batch,
    call_sample,
    checked,
    load_reward,
    recognise,
    value_of,
    values_of,
)

FIRST_DESCRIPTOR = 200  # above those of files that a function opens
MAX_REASON_CHARACTERS = 2000
OUT_OF_MEMORY = 77
"""Exit status of a worker whose function needed more memory than it may have."""

T = TypeVar("T")
R = TypeVar("R")


def serve(reward: str, requests: BinaryIO, replies: BinaryIO) -> None:
    """Load the function, report how it is called, then score samples until the input ends."""
    try:
        function = load_reward(reward)
        caller = RewardCaller(function, recognise(function, reward))
    except SettingsError as error:
        _send(replies, Refused(str(error)))
        return
    _send(replies, Loaded(caller.convention))
    number = 0
    try:
        while (body := caller.wait_for(read_frame, requests.read)) is not None:
            for outcomes in caller.judge(unpack_samples(body)):
                _send(replies, RewardOutcomes(number, outcomes))
                number += len(outcomes)
    except MemoryError:
        raise  # before anything is cleaned up, which needs memory, too
    except BaseException:
        caller.close()
        raise
    caller.close()


class RewardCaller:
    """Calls a reward function, and finishes its coroutines in one loop for the process's life."""

    def __init__(self, function: RewardFunction, convention: Convention) -> None:
        self._function, self.convention = function, convention
        self._runner: asyncio.Runner | None = None
        self._num_split = 0

    def wait_for(self, read: Callable[[T], R], source: T) -> R:
        """Read the next request; after the first coroutine, the event loop runs meanwhile."""
        if self._runner is None:
            return read(source)
        return self._runner.get_loop().run_until_complete(asyncio.to_thread(read, source))

    def close(self) -> None:
        """Cancel the tasks that still run in the loop."""
        if self._runner is not None:
            self._runner.close()

    def judge(self, samples: Sequence[RewardSample]) -> Iterator[list[RewardOutcome]]:
        """Yield the outcomes of all samples, in order, as soon as they are known.

        Raises:
            MemoryError: The function ran out of memory; the process has to end.
        """
        ranks = self.convention is Convention.GROUP
        if ranks or (self.convention is Convention.BATCH and len(samples) > 1):
            try:
                answer = call_batch(self._function, samples)
                if inspect.isawaitable(answer):
                    answer = self._loop.run_until_complete(_awaited(answer))
                values = values_of(answer, count=len(samples))
                yield [_outcome(value) for value in values]
                return
            except RewardError as error:  # not a list of n values: no sample is at fault
                yield [(None, str(error))] * len(samples)
                return
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - foreign code; called again below, one by one
                if ranks:
                    yield [_reason(error, samples[0])] * len(samples)
                    return
                self._note_split(error, len(samples))
        waiting: list[asyncio.Task[RewardOutcome] | RewardOutcome] = []
        for sample in samples:
            outcome = self._begin_sample(sample)
            if isinstance(outcome, tuple) and not waiting:
                yield [outcome]
            else:
                waiting.append(outcome)
        for item in waiting:  # all tasks run while the first is waited for
            yield [item if isinstance(item, tuple) else self._loop.run_until_complete(item)]

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        self._runner = self._runner or asyncio.Runner()
        return self._runner.get_loop()

    def _begin_sample(self, sample: RewardSample) -> asyncio.Task[RewardOutcome] | RewardOutcome:
        try:
            if self.convention is Convention.SAMPLE:
                answer = call_sample(self._function, sample)
            else:
                answer = call_batch(self._function, [sample])
            if inspect.isawaitable(answer):
                return self._loop.create_task(self._await_answer(answer, sample))
            return self._read_answer(answer)
        except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the reason
            return _reason(error, sample)

    async def _await_answer(self, answer: Awaitable[Any], sample: RewardSample) -> RewardOutcome:
        try:
            return self._read_answer(await answer)
        except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the reason
            return _reason(error, sample)

    def _read_answer(self, answer: Any) -> RewardOutcome:
        is_one = self.convention is Convention.SAMPLE
        return _outcome(value_of(answer) if is_one else values_of(answer, count=1)[0])

    def _note_split(self, error: Exception, count: int) -> None:
        self._num_split += 1
        if self._num_split.bit_count() == 1:  # the first, and whenever there are twice as many
            sys.stderr.write(
                f"the reward raised for {self._num_split} calls with several samples, which were "
                f"then judged one by one; the latest had {count}: {explain(error)}\n"
            )


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _reason(error: Exception, sample: RewardSample) -> RewardOutcome:
    """Return the outcome of a sample whose call failed.

    Raises:
        MemoryError: The error is a `MemoryError`.
    """
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, RewardError):
        return None, str(error)
    about = f"; for item {sample.index}, {quoted(sample.completion)}"
    reason = f"reward raised {explain(error)}"
    return None, reason[: MAX_REASON_CHARACTERS - len(about)] + about


def _outcome(value: object) -> RewardOutcome:
    try:
        return checked(value), None
    except RewardError as error:
        return None, str(error)


def _send(replies: BinaryIO, message: Reply) -> None:
    replies.write(pack_frame(message))
    replies.flush()


def main() -> None:
    """Serve on the socket that this process was started with."""
    die_with_parent()
    reward, memory_mb, inherited = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    requests, replies = (
        os.fdopen(fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR), mode)
        for mode in ("rb", "wb")
    )
    os.close(inherited)
    if memory_mb:
        # A limit of allocated memory, not of mapped memory: libraries map far more than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    try:
        serve(reward, requests, replies)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: cleaning up needs memory too


if __name__ == "__main__":
    main()
