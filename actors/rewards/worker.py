"""Process of a user's reward function: `python -m actors.rewards.worker path.py:function MiB FD`.

    READY --samples--> CALLING --an outcome for each sample, in order--> READY
    end of input -> exit

A batched function that raises is called again
with one sample at a time, so that only the sample at fault fails. One that runs out of memory ends
the process: what it keeps alive would fail every later call. Requests and replies have a socket of
their own, far from the descriptors that the function uses and closed in what it starts. Dies with
its parent.
"""

from __future__ import annotations

import fcntl
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from configs.child import die_with_parent, read_frame
from configs.errors import RewardError, SettingsError
from configs.own_code import explain

from .frames import (
    Loaded,
    Outcome,
    Outcomes,
    Refused,
    Reply,
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
)

FIRST_DESCRIPTOR = 200  # above those of files that a function opens
MAX_REASON_CHARACTERS = 2000
OUT_OF_MEMORY = 77
"""Exit status of a worker whose function needed more memory than it may have."""


def serve(reward: str, requests: BinaryIO, replies: BinaryIO) -> None:
    """Load the function, report how it is called, then score samples until the input ends."""
    try:
        function = load_reward(reward)
        convention = recognise(function, reward)
    except SettingsError as error:
        _send(replies, Refused(str(error)))
        return
    _send(replies, Loaded(convention))
    number = 0
    while (body := read_frame(requests.read)) is not None:
        for outcomes in judge(function, convention, unpack_samples(body)):
            _send(replies, Outcomes(number, outcomes))
            number += len(outcomes)


def judge(
    function: RewardFunction, convention: Convention, samples: Sequence[RewardSample]
) -> Iterator[list[Outcome]]:
    """Yield the outcomes of all samples, in order, as soon as they are known."""
    if convention is Convention.BATCH and len(samples) > 1:
        try:
            values = call_batch(function, samples)
            yield [_outcome(value) for value in values]
            return
        except RewardError as error:  # not a list of n values: no sample is at fault
            yield [(None, str(error))] * len(samples)
            return
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001, S110 - foreign code; called again below, one by one
            pass
    for sample in samples:
        yield [_judge_one(function, convention, sample)]


def _judge_one(function: RewardFunction, convention: Convention, sample: RewardSample) -> Outcome:
    try:
        if convention is Convention.BATCH:
            return _outcome(call_batch(function, [sample])[0])
        return _outcome(call_sample(function, sample))
    except RewardError as error:
        return None, str(error)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the reason
        about = f"; for item {sample.index}, {sample.completion!r:.80}"
        reason = f"reward raised {explain(error)}"
        return None, reason[: MAX_REASON_CHARACTERS - len(about)] + about


def _outcome(value: object) -> Outcome:
    try:
        return checked(value), None
    except RewardError as error:
        return None, str(error)


def _send(replies: BinaryIO, message: Reply) -> None:
    replies.write(pack_frame(message))
    replies.flush()


def main() -> None:
    """Serve on the pipes that this process was started with."""
    die_with_parent()
    reward, memory_mb, inherited = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    requests, replies = (
        os.fdopen(fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR), mode)
        for mode in ("rb", "wb")
    )
    os.close(inherited)
    if memory_mb:
        # What it allocates, not what it maps: libraries map far more than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    try:
        serve(reward, requests, replies)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: cleaning up needs memory too


if __name__ == "__main__":
    main()
