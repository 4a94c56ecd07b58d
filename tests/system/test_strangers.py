"""Thousands of connections to every port of a run whose processes may open few files."""

from __future__ import annotations

import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.learner.support.listening import family, listening_at, open_files
from tests.system.support import paced_reward
from tests.system.support.live_run import TORCH, LiveRun

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

OPEN_FILES = 1024
STRANGERS = 2000
"""At each port: no process has a file left that any of them can take."""
SPARE = 8
"""Files that a process may have open for a moment, such as one that it writes."""
MORE = 3
"""Batches that show that a run goes on."""

ENDLESS = (
    *TORCH,
    "run.steps=100000",
    "run.eval_every=0",
    "run.eval_episodes=0",
    f"run.reward={paced_reward.__file__}:paced",
)


def test_a_default_run_outlives_more_connections_than_it_may_open(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, "tiny.yaml", *ENDLESS)

    with run.up() as up, many_open_files():
        resource.prlimit(up.pid, resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        goes_on(run, up)
        names = processes(up)
        assert {resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in names} == {OPEN_FILES}
        before = {pid: len(open_files(pid)) for pid in names}
        ports = listening_at(up.pid)
        with ExitStack() as strangers:
            for address in ports:
                for _ in range(STRANGERS):
                    knock(address, strangers)
            run.wait_until(
                lambda: sum(len(open_files(pid)) == OPEN_FILES for pid in names) == len(ports),
                "each process with a port has no file left",
            )
            goes_on(run, up)

        run.wait_until(
            lambda: all(len(open_files(pid)) <= number + SPARE for pid, number in before.items()),
            "descriptors return",
        )
        goes_on(run, up)
        assert names.items() <= processes(up).items(), "nobody has died"
    assert "starts again" not in (tmp_path / "up.log").read_text()


def goes_on(run: LiveRun, up: subprocess.Popen[str]) -> None:
    """Wait for more batches."""
    trained = run.step
    run.wait_until(
        lambda: run.step >= trained + MORE or up.poll() is not None, "the run goes on training"
    )
    assert up.poll() is None, run.logs()


@contextmanager
def many_open_files() -> Iterator[None]:
    """Let this process open as many as it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def processes(up: subprocess.Popen[str]) -> dict[int, str]:
    """What works for the run: process ids and their words."""
    found = {}
    for pid in family(up.pid):
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


def knock(address: tuple[str, int], strangers: ExitStack) -> None:
    """Begin to connect, and wait for no answer."""
    one = strangers.enter_context(closing(socket.socket()))
    one.setblocking(False)
    with suppress(BlockingIOError):
        one.connect(address)
