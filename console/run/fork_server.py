"""The fork server as `nyala up` sees it: which process can be a fork, and how to ask for one."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO

from actors.engine.choice import ENGINES, choose_engine
from configs.machine import visible_gpus
from configs.secrets import FILE_VARIABLE, VARIABLE
from configs.settings import Settings

from .fork_process import MADE, MAX_FAULT_BYTES, NAME_ROOM, NEVER, READY
from .plan import environment_of
from .process import PYTHON, Command, ForkedChild
from .process_guard import ProcessGuard

IMPORT_S = 300.0  # from a cold disk
FORK_S = 30.0  # it takes milliseconds
POLL_S = 0.02
GRACE_S = 1.0  # a server has nothing to save
PR_SET_CHILD_SUBREAPER = 36
ROOMY = 4
"""Least number of cores with which two servers import libraries at a time. With fewer cores the
second server is a fork of the first."""
CHECKS = f"{__package__}.preflight"
SECRETS = {VARIABLE, FILE_VARIABLE}
"""Environment variables that hold secrets, which no library reads."""


@contextmanager
def fork_server_of(settings: Settings) -> Iterator[ForkServer | None]:
    """Start the fork server of a run and end it; None except on Linux.

    A guard ends the server if `nyala up` is killed, even while the server hangs in an import.
    """
    if sys.platform != "linux":
        yield None
        return
    engine = choose_engine(settings, on_gpu=bool(visible_gpus())).engine
    with closing(ProcessGuard(grace_s=GRACE_S)) as guard:
        server = ForkServer(engine, environment_of("actor", settings))
        for pid in server.pids:
            guard.add(pid)
        try:
            yield server
        finally:
            server.close()
            for pid in server.pids:
                guard.remove(pid)


class ForkServer:
    """Forks a learner, an actor, or the checks of a start.

    A command that it cannot fork has to begin as a new program.

    Example:
        forks = ForkServer("torch", environment)
        if forks.has_decided(command):
            child = forks.start(command, log, log)
    """

    def __init__(self, engine: str, environment: Mapping[str, str]) -> None:
        """Start the processes of the server.

        Args:
            engine: Engine of the actors.
            environment: Environment of an actor: libraries read it when they are imported.
        """
        self._environment = {
            name: value for name, value in environment.items() if name not in SECRETS
        }
        self.has_room = len(os.sched_getaffinity(0)) >= ROOMY
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for _ in range(2 if ENGINES[engine].is_forked_apart else 1)
        ]
        lines = [ForkServerConnection(ours) for ours, _ in pairs]
        self._lines = {"learner": lines[0], CHECKS: lines[0], "actors": lines[-1]}
        learner, actor = ([str(theirs.fileno()) for _, theirs in pairs] + ["-"])[:2]
        servers = [(engine, learner, actor)]
        if actor != "-" and self.has_room:
            servers = [("", learner, "-"), (engine, "-", actor)]
        self._servers = [self._begin(*arguments) for arguments in servers]
        for _, theirs in pairs:
            theirs.close()

    def _begin(self, engine: str, *descriptors: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*PYTHON, f"{__package__}.fork_process", engine, *descriptors, NAME_ROOM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a new program then reports what is wrong
            env=self._environment,
            pass_fds=[int(text) for text in descriptors if text != "-"],
            start_new_session=True,
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers that this process started; a fork of the first is left out."""
        return [server.pid for server in self._servers]

    def fault(self, command: Command) -> str:
        """Return why the server does not fork a command; empty = it does, or gave no reason."""
        line = self._line(command)
        return "" if line is None else line.fault

    def has_decided(self, command: Command) -> bool:
        """Return whether `start` would answer at once."""
        line = self._line(command)
        return line is None or line.has_decided()

    def wait(self, command: Command) -> None:
        """Wait until `start` would answer at once, for `IMPORT_S` (5 minutes) at most."""
        while not self.has_decided(command):
            time.sleep(POLL_S)

    def start(
        self, command: Command, out: BinaryIO, err: BinaryIO, stdin: BinaryIO | None = None
    ) -> ForkedChild | None:
        """Begin a command as a fork.

        Args:
            command: The command to run.
            out: Its standard output.
            err: Its standard error.
            stdin: Its standard input; None = empty.

        Returns:
            The fork; None where the command has to begin as a new program, as before the server has
            decided.
        """
        line = self._line(command)
        if line is None:
            return None
        request = {"command": command.arguments, "environment": dict(command.environment)}
        files = [file.fileno() for file in (out, err, stdin) if file is not None]
        pid = line.request_fork(json.dumps(request).encode(), files)
        return None if pid is None else ForkedChild(pid)

    def close(self) -> None:
        """End the server; processes that it has forked go on."""
        for line in self._lines.values():
            line.close()
        for server in self._servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def _line(self, command: Command) -> ForkServerConnection | None:
        """Return the line for a command; None if no server has its module and environment."""
        python, module = command.arguments[: len(PYTHON)], command.arguments[len(PYTHON) :][:1]
        # The command may have more variables: libraries have set them here since.
        if python != PYTHON or not self._environment.items() <= command.environment.items():
            return None
        return self._lines.get("".join(module))


class ForkServerConnection:
    """A connection to the server, until it fails."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._is_ready = False
        self._is_closed = False
        self.fault = ""
        """Why the server ended before it was ready, if it said so."""
        self._deadline = time.monotonic() + IMPORT_S

    def has_decided(self) -> bool:
        """Return whether the server is ready to fork, or never will be."""
        if self._is_ready or self._is_closed:
            return True
        message = self._read(0.0) or b""
        self._is_ready = message == READY
        if message.startswith(NEVER):
            self.fault = message.removeprefix(NEVER).decode(errors="replace")
            self.close()
        if time.monotonic() > self._deadline:
            self.close()
        return self._is_ready or self._is_closed

    def request_fork(self, request: bytes, files: list[int]) -> int | None:
        """Return the process id of a fork, which is a child of this process.

        None if the server is not ready. None also if the fork failed, which closes the connection.
        """
        if not self._is_ready or self._is_closed:
            return None
        try:
            with _adopting_orphans():
                socket.send_fds(self._connection, [request], files)
                pid = self._read(FORK_S)
                if pid is not None and self._read(FORK_S) == MADE and _is_child(int(pid)):
                    return int(pid)
        except OSError:  # the server has ended, or the request is too long for the socket
            pass
        self.close()
        return None

    def close(self) -> None:
        """Close the connection; the line is never used again."""
        self._is_closed = True
        self._connection.close()

    def _read(self, timeout_s: float) -> bytes | None:
        """Return a message, or None if there is none; close the line if the server has ended."""
        if not select.select([self._connection], [], [], timeout_s)[0]:
            return None
        try:
            message = self._connection.recv(len(NEVER) + MAX_FAULT_BYTES)
        except OSError:
            message = b""
        if not message:
            self.close()
        return message or None


def _is_child(pid: int) -> bool:
    """Return whether a fork has become a child of this process; kill it if it has not.

    It has not if the server is a fork of one that has died: this process is then no ancestor of it.
    """
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return False
    return True


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants that are orphaned meanwhile."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
