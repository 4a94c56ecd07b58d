"""Fork server of `nyala up`: imports the libraries of learner and actors once, then forks them.

Run as `python -m console.run.fork_process ENGINE DESCRIPTOR...`, each a Unix socket of whole
messages: the first forks learners, checks of a start and, with the small engine, actors. With vLLM,
which takes as long again to import, a second one forks actors.

    import -> READY -> a request: command, environment, files -> a process id, MADE -> ... -> end

A fork is safe while there is one thread and no device is open: one of a process that has met CUDA
could not use it. To import starts no thread and meets no device, and a server that finds either
ends instead: then every process is a new program. A process is
forked by one in between that ends at once: so it becomes a child of `nyala up`, which waits for its
exit code. What a request holds, such as the URL of the store, is never in the server's own memory.
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

DRIVER = "libcuda.so.1"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: `cuInit` was never called
READY = b"ready"
MADE = b"made"
MAX_REQUEST_BYTES = 2**17  # below what a socket holds
BOTH = ("learner.assembly", "transformers.models.auto.tokenization_auto")
"""Libraries of the learner, and of the checks of a start."""
NAME_ROOM = "." * 4096
"""Last argument of a server: forks write their own command over that of the server."""


def main(engine: str, lines: list[socket.socket]) -> dict[str, Any]:
    """Import, then serve; return in a fork, with what was asked for."""
    gc.disable()  # what importing makes stays: looking for garbage in it takes a fifth of the time
    for name in BOTH:
        import_module(name)
    line = lines[0]
    if len(lines) == 1:
        import_libraries(engine)
    elif not os.fork():
        line = lines[1]
        import_libraries(engine)
    for other in lines:
        if other is not line:
            other.close()
    gc.freeze()  # a search for garbage would copy pages that forks share
    if len(list(Path("/proc/self/task").iterdir())) > 1 or has_met_cuda():
        os._exit(1)
    return _serve(line)


def has_met_cuda() -> bool:
    """Whether something in this process has asked CUDA's driver for more than its version."""
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # nothing has loaded it
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALIZED


def _serve(line: socket.socket) -> dict[str, Any]:
    line.send(READY)
    while line.recv(1, socket.MSG_PEEK):
        between = os.fork()
        if not between:
            message, files, *_ = socket.recv_fds(line, MAX_REQUEST_BYTES, 3)
            child = os.fork()
            if not child:
                line.close()
                _take(files)
                return dict(json.loads(message))
            line.send(str(child).encode())
            os._exit(0)
        if os.waitpid(between, 0)[1]:
            break  # its request may still be there
        line.send(MADE)  # it has ended, so what it forked has its new parent
    os._exit(0)


def _take(files: list[int]) -> None:
    """Begin a process group with these as standard output, error and, if it is there, input."""
    os.setsid()
    for standard, given in zip((1, 2, 0), files, strict=False):
        os.dup2(given, standard)
        os.close(given)


def become(command: list[str], environment: dict[str, str]) -> None:
    """Go on as `python -P -m MODULE ARGUMENT...` would begin, apart from what is imported."""
    os.environ.clear()
    os.environ.update(environment)
    rename(command)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # unlike those of `random`, its numbers would be the same in all forks
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
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[2:-1]]
    become(**main(sys.argv[1], sockets))
