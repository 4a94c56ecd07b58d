"""Fork server of `nyala up`: imports the libraries of learner and actors once, then forks them.

`fork_server.py` runs it as `python -m console.run.fork_process ENGINE LEARNER ACTOR`. LEARNER and
ACTOR are descriptors of Unix sockets that keep message boundaries, or `-`. Requests on LEARNER are
for forks of learners, of checks of a start and, with the small engine, of actors. Importing vLLM
takes as long again, so actors with vLLM are requested on ACTOR from a second process. On a machine
of few cores the second process is itself a fork, which has the libraries of the first.

    import -> READY -> a request: command, environment, files -> a process id, MADE -> ... -> end

A server that finds that a fork would not be safe (`configs/forks.py`) says why and ends. Every
process is then a new program. Each process is forked by an intermediate process that ends at once:
it thereby becomes a child of `nyala up`, which waits for its exit code. The content of a request,
such as the URL of the store, is never in the memory of the server itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from actors.engine.choice import import_libraries
from configs.forks import fault_of_forks

READY = b"ready"
NEVER = b"never: "
MADE = b"made"
MAX_FAULT_BYTES = 2**11
MAX_REQUEST_BYTES = 2**17  # below what a socket holds
BOTH = ("learner.assembly", "transformers.models.auto.tokenization_auto")
"""Modules that import the libraries of the learner and of the checks of a start."""
NAME_ROOM = "." * 4096
"""Last argument of a server: makes room for a fork to write its own command there."""


def main(engine: str, learner: socket.socket | None, actor: socket.socket | None) -> dict[str, Any]:
    """Import the libraries, then serve requests; return only in a fork, with its request.

    Args:
        engine: Engine of the actors, whose libraries are imported; empty = none.
        learner: Socket of requests that need the learner's libraries; for actors too if `actor` is
            None.
        actor: Socket of requests for actors.
    """
    gc.disable()  # imported objects stay: searching them for garbage takes a fifth of the time
    for name in BOTH if learner else ():
        import_module(name)
    lines, fault = [line for line in (learner, actor) if line], ""
    line = lines[0]
    if learner and actor and not (fault := fault_of_forks()):
        is_actor = not os.fork()
        line, other, engine = (actor, learner, engine) if is_actor else (learner, actor, "")
        other.close()
        lines = [line]
    if engine and not fault:
        import_libraries(engine)
    gc.freeze()  # a search for garbage would copy pages that forks share
    if fault := fault or fault_of_forks():
        for line in lines:
            line.send(NEVER + fault.encode()[:MAX_FAULT_BYTES])
        os._exit(1)
    return _serve(line)


def _serve(line: socket.socket) -> dict[str, Any]:
    """Fork for each request until the other end closes; return in the fork, with its request."""
    line.send(READY)
    while line.recv(1, socket.MSG_PEEK):
        between = os.fork()
        if not between:
            message, files, *_ = socket.recv_fds(line, MAX_REQUEST_BYTES, 3)
            child = os.fork()
            if not child:
                line.close()
                _take_standard_files(files)
                return dict(json.loads(message))
            line.send(str(child).encode())
            os._exit(0)
        if os.waitpid(between, 0)[1]:
            break  # it failed, and may not have read its request
        line.send(MADE)  # `between` has ended, so its fork has been given its new parent
    os._exit(0)


def _take_standard_files(files: list[int]) -> None:
    """Begin a process group with `files` as standard output, error and, if given, input."""
    os.setsid()
    for standard, file in zip((1, 2, 0), files, strict=False):
        os.dup2(file, standard)
        os.close(file)


def become(command: list[str], environment: dict[str, str]) -> None:
    """Run as `python -P -m MODULE ARGUMENT...` would, with the libraries already imported."""
    os.environ.clear()
    os.environ.update(environment)
    rename(command)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # unlike `random`, numpy would draw the same numbers in all forks
    gc.enable()
    _python, _safe_path, _m, module, *arguments = command
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def rename(command: list[str]) -> None:
    """Have `ps` and /proc show this command, if there is room for it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: proc_pid_stat(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    if len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    rename(sys.orig_argv[:-1])
    lines = [None if text == "-" else socket.socket(fileno=int(text)) for text in sys.argv[2:4]]
    become(**main(sys.argv[1], *lines))
