"""Every process of ours is a new program: a fork of one that asked for CUDA can never use it.

Once `torch.cuda.is_available` was called, a process that is forked and goes on without another
program gets "Cannot re-initialize CUDA in forked subprocess" (tests/gpu/test_processes.py shows it
on a card). So nobody here forks, apart from the fork server, which ends where it has met CUDA
(`tests/console/forks/`), and the keeper of an agent, a program of the standard library alone: the
sources have no way to, and what they start lets go of a descriptor that ends with a new program.
"""

from __future__ import annotations

import ast
import asyncio
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from actors.environments.hosted.process import HostProcess
from console.run.process import Command, Process
from learner.launch import MachineRanks, RankProcesses

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "buffer", "broker", "actors", "agents", "learner", "console", "lab")
MAY_FORK = {ROOT / "console/run/fork_process.py", ROOT / "agents/keeper.py"}
SLEEP = (sys.executable, "-c", "import signal; signal.pause()")

HARMLESS = {"multiprocessing.process", "multiprocessing.connection"}
"""Types and waits, which start nothing."""
FORKING = {"fork", "forkpty", "ProcessPoolExecutor", "DataLoader", "get_context"}
FORKING_KEYWORDS = {"preexec_fn", "num_proc", "mp_context"}


def forks_in(tree: ast.Module) -> Iterator[str]:
    """Name what forks, or may."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            names = [module] if module in HARMLESS else names[1:]
            names = [name for name in names if name not in HARMLESS]
        for name in names:
            parts = name.split(".")
            if ("multiprocessing" in parts and name not in HARMLESS) or FORKING & set(parts):
                yield name
        if isinstance(node, ast.Attribute) and node.attr in FORKING:
            yield node.attr
        if isinstance(node, ast.keyword) and node.arg in FORKING_KEYWORDS:
            yield str(node.arg)


@pytest.mark.slow
def test_no_source_has_a_way_to_fork() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path not in MAY_FORK
        for name in forks_in(ast.parse(path.read_text(encoding="utf-8")))
    }

    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "import multiprocessing",
        "from multiprocessing import Process",
        "from torch.multiprocessing import spawn",
        "from torch import multiprocessing as mp",
        "from concurrent.futures import ProcessPoolExecutor",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.Popen(['x'], preexec_fn=print)",
        "rows.map(f, num_proc=4)",
    ],
)
def test_a_way_to_fork_is_found(source: str) -> None:
    assert list(forks_in(ast.parse(source)))


def is_new_program(start: Callable[[], object], patience_s: float = 30.0) -> bool:
    """Start a process, and look whether it has let go of a descriptor as a new program does."""
    reader, writer = os.pipe()  # closed by exec
    os.set_inheritable(writer, False)
    try:
        start()
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], patience_s)
        return bool(ready) and os.read(reader, 1) == b""
    finally:
        os.close(reader)


class Groups:
    """Nobody's register of groups: the test ends what it starts."""

    def add(self, group: int) -> None: ...

    def remove(self, group: int) -> None: ...


@contextmanager
def rank() -> Iterator[Callable[[], None]]:
    started: list[RankProcesses] = []
    yield lambda: started.append(RankProcesses(SLEEP, MachineRanks(0, 1, 1), {}))
    for each in started:
        each.end_processes(0.0)


@contextmanager
def process_of_up() -> Iterator[Callable[[], None]]:
    log = Path(os.devnull)
    process = Process(Command("x", "actor", SLEEP, log, dict(os.environ)), Groups())
    yield process.start
    process.kill()


@contextmanager
def environment_host() -> Iterator[Callable[[], None]]:
    started: list[HostProcess] = []

    def start() -> None:
        started.append(HostProcess(Path(sys.executable), threads=1))
        while started[0].pid is None:
            os.sched_yield()

    yield start
    for each in started:
        each.kill("the test is over")


@contextmanager
def reward_worker() -> Iterator[Callable[[], None]]:
    """As rewards are started: by the event loop of an actor."""
    loop = uvloop.new_event_loop()
    begin = asyncio.create_subprocess_exec(*SLEEP, start_new_session=True)
    started: list[asyncio.subprocess.Process] = []
    yield lambda: started.append(loop.run_until_complete(begin))
    for process in started:
        process.kill()
        loop.run_until_complete(process.wait())
    loop.close()


@pytest.mark.parametrize("way", [rank, process_of_up, environment_host, reward_worker])
def test_what_we_start_is_a_new_program(way: Callable[[], object]) -> None:
    with way() as start:  # type: ignore[attr-defined]
        assert is_new_program(start)


def test_a_fork_is_none() -> None:
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=signal.pause, daemon=True)
    try:
        assert not is_new_program(child.start, patience_s=0.5)  # it would hold it for ever
    finally:
        child.kill()
        child.join()
