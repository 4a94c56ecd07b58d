"""Programs of a model, run in a process that can compute and nothing else.

    Sandbox.find --the first view from which nothing escapes--> run: a process, its output, its end

Every program has one process, which cannot start another, with limits of CPU time, memory and
output, and a view of Python's own files alone: one of two kinds of isolation in `kernel.py`.
Results are judged in the actor, or in a third process that the program cannot reach
(`remote_calls.py`).
"""

from __future__ import annotations

import fcntl
import math
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from configs.errors import RewardError, SettingsError, quoted

from .entry import READY
from .kernel import VIEWS
from .remote_calls import PASSED

ROOT = Path(__file__).parents[2]
ENTER = f"import sys; sys.path.append({str(ROOT)!r}); from actors.sandbox.entry import main; main()"
INTERPRETER = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
START_S = 10.0  # of Python itself, on a busy machine
KILL_S = 5.0
READ_BYTES = 1 << 16
REMEDY = (
    "it takes Linux 5.13 or newer with Landlock, or 5.14 with user namespaces, neither of them "
    "forbidden to the container, a Python that all users can read, and for root another user in "
    "its user namespace"
)
REASON_BYTES = 2000

PROBE = """
import decimal, heapq, os, socket, threading
refused = []
def must_fail(what, *args):
    try: what(*args)
    except OSError: refused.append(what)
must_fail(open, "/etc/passwd")
must_fail(open, "/proc/self/environ")
must_fail(open, heapq.__file__, "r+b")
must_fail(os.fork)
must_fail(os.kill, os.getppid(), 0)
must_fail(socket.socket)
thread = threading.Thread(target=lambda: refused.append("thread"))
thread.start()
thread.join()
print(len(refused), input())
"""
PROBED = b"7 asked\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program."""

    time_s: float = 5.0
    """CPU time, rounded up to a second."""
    wall_s: float = 16.0
    """Wall time, which also ends a program that only waits."""
    memory_mb: int = 512
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The end of a program."""

    output: bytes
    """Its output, up to the limit and a little more."""
    status: int | None
    """Its exit status, negative after a signal; None = ended at a limit of time or output."""


class Sandbox:
    """Runs programs; threads may share it.

    Example:
        sandbox = Sandbox.find()
        outcome = sandbox.run("print(int(input()) + 1)", b"41", Limits())
    """

    def __init__(self, view: str) -> None:
        """Prepare; `find` chooses a view that was tried."""
        self.view = view

    @classmethod
    def find(cls) -> Sandbox:
        """Return a sandbox that was tried on this machine.

        Raises:
            SettingsError: This machine offers no sandbox; the text names what is missing.
            RewardError: The system cannot start a process to try one.
        """
        if platform.machine() != "x86_64":
            raise SettingsError(
                f"a sandbox for programs must be on x86_64, got {platform.machine()}; start actors "
                "on machines of that kind, or use another scorer than code"
            )
        reasons = []
        for view in VIEWS:
            reason = cls(view).why_not()
            if not reason:
                return cls(view)
            reasons.append(f"{view}: {reason}")
        raise SettingsError(
            f"a sandbox for programs must be possible on this machine, got "
            f"{', and '.join(reasons)}; {REMEDY}"
        )

    def why_not(self) -> str:
        """Try what a program must not be able to do; return the fault, or an empty text.

        Raises:
            RewardError: The system cannot start a process.
        """
        command = self._command("program", Limits())
        with _SandboxedProcess(command, PROBE, b"asked", errors=subprocess.PIPE) as probe:
            with suppress(RewardError):
                _collect([probe], Limits())
            if probe.output == READY + PROBED:
                return ""
            last = probe.reason().strip().rpartition("\n")[2]
            return last or f"a program could do too much, or too little: {quoted(probe.output)}"

    def run(self, program: str, stdin: bytes, limits: Limits) -> ProgramResult:
        """Run a program to its end, or to one of its limits, at which it is killed.

        Raises:
            RewardError: The system cannot start a process, so nothing was run.
        """
        with _SandboxedProcess(self._command("program", limits), program, stdin) as process:
            _collect([process], limits)
            return ProgramResult(process.output.removeprefix(READY), process.status())

    def passes(self, program: str, role: str, tests: str, limits: Limits) -> bool:
        """Let tests in a sandbox of their own call a program, and return whether all hold.

        Args:
            program: Program that defines the functions under test.
            role: `tests` or `calls` (`remote_calls.py`).
            tests: Text that the role runs.
            limits: Limits of each of the two processes.

        Returns:
            False also where a process reaches a limit, or the program ends too early.

        Raises:
            RewardError: The system cannot start a process, so nothing was run.
        """
        with ExitStack() as processes:
            with ExitStack() as ends:
                requests, replies = _pipe(ends), _pipe(ends)
                channel = (replies[0], requests[1])
                command = self._command(role, limits, *channel)
                judge = processes.enter_context(_SandboxedProcess(command, tests, channel=channel))
                channel = (requests[0], replies[1])
                command = self._command("answers", limits, *channel)
                process = processes.enter_context(
                    _SandboxedProcess(command, program, channel=channel)
                )
            _collect([judge, process], limits)
            return judge.output == READY + PASSED and judge.status() == 0

    def _command(self, role: str, limits: Limits, *channel: int) -> list[str]:
        cpu_s, memory_mb = math.ceil(limits.time_s), limits.memory_mb
        arguments = [self.view, role, cpu_s, memory_mb, os.getpid(), *channel]
        flags = ("-I", "-S", "-B", "-X", "utf8")
        return [INTERPRETER, *flags, "-c", ENTER, *map(str, arguments)]


class _SandboxedProcess:
    """One process in the sandbox, and its output."""

    def __init__(
        self,
        command: list[str],
        program: str,
        stdin: bytes = b"",
        errors: int = subprocess.DEVNULL,
        channel: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Raises:
            RewardError: The system has no process or descriptor left.
        """
        self.printed = bytearray()
        try:
            with _sealed(program.encode(errors="replace"), stdin) as sealed:
                self._process = subprocess.Popen(
                    command,
                    stdin=sealed,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd="/",
                    env={"MALLOC_ARENA_MAX": "1"},  # an arena for each thread is address space
                    pass_fds=channel,
                    start_new_session=True,
                )
        except OSError as error:
            raise RewardError(
                f"the process of a sandbox must start, got {error}; look at the memory and the "
                "processes of this machine"
            ) from error
        assert self._process.stdout is not None
        self.pipe = self._process.stdout.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self.wait(KILL_S)  # a process that is stuck in the kernel ends later

    @property
    def output(self) -> bytes:
        """The output so far."""
        return bytes(self.printed)

    @property
    def has_begun(self) -> bool:
        """Whether the process has given up its rights and runs the program."""
        return self.printed.startswith(READY)

    def read(self) -> bool:
        """Read output; False = the output has ended."""
        part = os.read(self.pipe, READ_BYTES)
        self.printed += part
        return bool(part)

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, for so long at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def status(self) -> int | None:
        """Return the exit status, negative after a signal; None = the process still runs."""
        return self._process.poll()

    def reason(self) -> str:
        """Kill the process, and return its standard error."""
        assert self._process.stderr is not None
        self._process.kill()
        return self._process.stderr.read(REASON_BYTES).decode(errors="replace")


def _collect(processes: Sequence[_SandboxedProcess], limits: Limits) -> None:
    """Read what processes print until the first of them has ended, or one prints too much.

    Raises:
        RewardError: A process was not ready in time, so its program has not begun.
    """
    first = processes[0]
    poll = select.poll()
    by_pipe = {process.pipe: process for process in processes}
    for pipe in by_pipe:
        poll.register(pipe, select.POLLIN)
    deadline, have_begun = time.monotonic() + START_S, False
    while first.pipe in by_pipe and (left := deadline - time.monotonic()) > 0:
        for pipe, _ in poll.poll(left * 1000):
            process = by_pipe[pipe]
            if not process.read():
                poll.unregister(pipe)
                del by_pipe[pipe]
            if len(process.printed) > limits.output_bytes:
                return
        if not have_begun and all(process.has_begun for process in processes):
            deadline, have_begun = time.monotonic() + limits.wall_s, True
    first.wait(deadline - time.monotonic())
    if not all(process.has_begun for process in processes):
        raise RewardError(
            f"every process of a sandbox must be ready within {START_S:g} s, got one that was not, "
            "so nothing was scored; look at the memory and the load of this machine"
        )


def _pipe(ends: ExitStack) -> tuple[int, int]:
    pipe = os.pipe()
    for end in pipe:
        ends.callback(os.close, end)
    return pipe


@contextmanager
def _sealed(program: bytes, stdin: bytes) -> Iterator[int]:
    """Open the input of a process, sealed so that it cannot be changed."""
    file = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(len(program).to_bytes(8, "big") + program + stdin)
        os.lseek(file, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        yield file
    finally:
        os.close(file)
