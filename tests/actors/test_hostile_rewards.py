"""Reward functions that write where they should not, print without end, or leave processes."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import time
from pathlib import Path

import pytest
import uvloop

from actors.rewards.functions import RewardSample
from actors.rewards.process import RewardProcess
from configs.errors import RewardError
from tests.waiting import until

WRITES_EVERYWHERE = """
import os
def f(output, prompt):
    if output == "bad":
        for fd in range(3, 1024):
            try: os.write(fd, {garbage!r})
            except OSError: pass
    return len(output)
"""

LEAVES_A_DAEMON = """
import os, signal
def f(output, prompt):
    if os.fork() == 0:
        os.setsid()
        signal.pause()
        os._exit(0)
    {then}
    return 1.0
"""

HELPER_AT_IMPORT = """
import signal, subprocess
helper = subprocess.Popen(["sleep", "60"], start_new_session=True)
def f(output, prompt):
    signal.pause()
"""

RETURNS_TWICE = """
import os
def f(output, prompt):
    if output == "bad":
        os.fork()
    return len(output)
"""

PRINTS = """
import sys
def f(output, prompt):
    for _ in range(64):
        sys.stdout.write("x" * 2**20)
        sys.stderr.write("y" * 2**20)
    return 1.0
"""


def score(path: Path, source: str, completions: list[str], *, timeout_s: float = 20.0):
    """Score samples one by one; returns the results, the number of restarts, and all seconds."""
    file = path / "reward.py"
    file.write_text(source)

    async def run():
        process = RewardProcess(f"{file}:f", timeout_s=timeout_s)
        await process.start()
        try:
            results = []
            for completion in completions:
                results += await process.score(
                    [RewardSample("p", (), completion, (), "a", 0, "t", 0)]
                )
            return results, process.num_restarts
        finally:
            await process.close()

    began = time.monotonic()
    results, restarts = asyncio.run(asyncio.wait_for(run(), 90))
    return results, restarts, time.monotonic() - began


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x00\x05garbage" * 3,  # a frame that is no message, and more
        b"\xff\xff\xff\xff",  # a frame of four gigabytes
        b"\x00\x00\x00\x01\xc0",  # a frame that is another type
    ],
)
def test_garbage_among_the_replies_costs_its_own_sample(tmp_path, garbage):
    results, restarts, _ = score(
        tmp_path, WRITES_EVERYWHERE.format(garbage=garbage), ["good", "bad", "ugly"]
    )

    assert results[0] == 4.0
    assert isinstance(results[1], RewardError)
    assert "answers" in str(results[1])
    assert results[2] == 4.0
    assert restarts == 1


def test_an_answer_that_is_given_twice_is_never_taken_for_the_next_samples(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(RETURNS_TWICE)
    scored = []

    async def run():
        process = RewardProcess(f"{file}:f", timeout_s=20.0)
        await process.start()
        try:
            turns = itertools.chain(("ab", "bad"), itertools.cycle(("a", "abcde")))
            while not process.num_restarts:  # the second answer comes whenever its process runs
                completion = next(turns)
                sample = RewardSample("p", (), completion, (), "a", 0, "t", 0)
                (result,) = await process.score([sample])
                scored.append((completion, result))
        finally:
            await process.close()

    asyncio.run(asyncio.wait_for(run(), 90))

    assert scored[0] == ("ab", 2.0)
    failed = [result for _, result in scored if isinstance(result, RewardError)]
    assert len(failed) == 1  # found out once, and the worker replaced
    assert all(result == len(text) for text, result in scored if result not in failed)
    assert scored[-1][1] == len(scored[-1][0])  # by the new one


def test_what_a_reward_prints_is_bounded_and_the_rest_is_counted(tmp_path, capfd):
    results, restarts, _ = score(tmp_path, PRINTS, ["a", "b"])

    out, err = capfd.readouterr()
    assert (results, restarts) == ([1.0, 1.0], 0)
    assert len(out) + len(err) < 2**18
    assert "bytes dropped" in out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "result"),
    [
        (LEAVES_A_DAEMON.format(then=""), 1.0),
        (LEAVES_A_DAEMON.format(then="signal.pause()"), None),
        (HELPER_AT_IMPORT, None),
    ],
)
def test_a_process_that_outlives_the_reward_delays_nothing(tmp_path, source, result):
    results, _, seconds = score(tmp_path, source, ["a"], timeout_s=1)

    assert seconds < 20
    if result is None:
        assert "must return within" in str(results[0])
    else:
        assert results == [result]


def test_a_reward_inherits_no_input_and_two_outputs(tmp_path):
    seen = tmp_path / "seen"
    source = f"""
import os, pathlib, subprocess
def f(output, prompt):
    found = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True).stdout
    pathlib.Path({str(seen)!r}).write_text(os.readlink("/proc/self/fd/0") + found)
    return 1.0
"""

    results, _, _ = score(tmp_path, source, ["a"])

    assert results == [1.0]
    assert seen.read_text().startswith("/dev/null")
    assert "socket" not in seen.read_text()


def test_a_full_disk_under_the_actors_own_log_costs_no_sample(tmp_path, monkeypatch):
    refused = []

    def full(_descriptor, data):
        refused.append(data)
        raise OSError(28, "No space left on device")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        file = tmp_path / "prints.py"
        file.write_text(
            "def f(completions, **_):\n    print('hello', flush=True)\n    return [1.0]\n"
        )

        async def run():
            process = RewardProcess(f"{file}:f", timeout_s=20.0)
            await process.start()
            try:
                results = []
                for number in range(5):
                    with monkeypatch.context() as disk:
                        disk.setattr("actors.rewards.channel.os.write", full)
                        sample = RewardSample("p", (), "x", (), "a", 0, "t", 0)
                        results += await process.score([sample])
                        await until(lambda: len(refused) > number)  # noqa: B023 - called at once
                return results, process.num_restarts
            finally:
                await process.close()

        results, restarts = runner.run(asyncio.wait_for(run(), 60))

    assert results == [1.0] * 5
    assert restarts == 0


def test_a_worker_that_cannot_start_leaves_no_descriptor(monkeypatch):
    async def refuses(*_command, **_options):
        raise OSError(errno.EMFILE, "Too many open files")

    async def story():
        process = RewardProcess("reward.py:f", timeout_s=5)
        counts = []
        for _ in range(4):
            with pytest.raises(RewardError, match=r"must start, got: .*Too many open files"):
                await process.start()
            await asyncio.sleep(0)  # transports close in the next round of the loop
            counts.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - no paths are wanted
        return counts

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    counts = asyncio.run(story())

    assert max(counts) == counts[0]  # those that others have left behind may close meanwhile
