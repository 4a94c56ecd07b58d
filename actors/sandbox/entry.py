"""Process in the sandbox: gives up the rights that it does not need, then runs a program.

    python -I -S -c "…" VIEW ROLE CPU_SECONDS MEMORY_MIB PARENT DESCRIPTOR…

    its user's rights --view, limits, own user, filter--> READY is written --the program--> exit

`sandbox.py` starts it. The program comes on standard input, behind its length, and is followed by
its own input. All steps come before the first line of the program. If a step fails, the program is
not run.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys
from collections.abc import Callable

from configs.child import die_with_parent

from . import kernel
from .kernel import NAMESPACES, enter_namespaces, filter_for, readable, restrict_with_landlock

READY = b"ready\n"
"""Written before the program runs, so that it can neither write nor withhold it."""

NICENESS = 10  # the actor comes first
STACK_BYTES = 64 << 20
MAX_DESCRIPTORS = 64
MAX_THREADS = 32
OWN_USERS = 1 << 30  # user ids from here on are unused: each process gets one
NOBODY = 65534


def main() -> None:
    """Give up rights, and run the program from standard input."""
    view, role, cpu_s, memory_mb, parent, *descriptors = sys.argv[1:]
    del sys.argv[1:]
    program = _read_exactly(int.from_bytes(_read_exactly(8), "big")).decode()
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site` would give them
    os.nice(NICENESS)
    run = _function_of_role(role, [int(number) for number in descriptors])
    _give_up_rights(view, int(parent), cpu_s=int(cpu_s), memory_bytes=int(memory_mb) << 20)
    os.write(1, READY)
    run(program)


def _function_of_role(role: str, channel: list[int]) -> Callable[[str], None]:
    if role == "program":
        return _run_program
    from . import remote_calls  # noqa: PLC0415 - json takes as long to import as Python to start

    sys.set_int_max_str_digits(0)  # results of any length cross as text
    incoming, outgoing = channel
    return lambda program: remote_calls.ROLES[role](incoming, outgoing, program)


def _run_program(program: str) -> None:
    module = sys.modules["__main__"] = type(sys)("__main__")
    exec(compile(program, "program.py", "exec"), vars(module))  # noqa: S102 - what this is for


def _give_up_rights(view: str, parent: int, *, cpu_s: int, memory_bytes: int) -> None:
    _end_first_without_memory()
    is_root, paths, others = os.geteuid() == 0, readable(), _count_threads()
    kernel.prctl("no new privileges", kernel.PR_SET_NO_NEW_PRIVS, 1)
    if view == NAMESPACES:
        enter_namespaces(paths, as_root=is_root)
        counts_alone = not is_root or _take_own_user()
    else:
        counts_alone = is_root and _take_own_user()
        restrict_with_landlock(paths)
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_NPROC: MAX_THREADS + (0 if counts_alone else others),
        resource.RLIMIT_STACK: STACK_BYTES,
    }
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (most, most))
    kernel.drop_capabilities()
    kernel.prctl("no dumps", kernel.PR_SET_DUMPABLE, 0)
    die_with_parent(parent=parent)
    kernel.install_filter(filter_for(os.getpid()))


def _take_own_user() -> bool:
    """Become a user that no other process has; False = `nobody`, whose threads may be several.

    Raises:
        OSError: This process may not change its user.
    """
    for number in (OWN_USERS + os.getpid(), NOBODY):
        try:
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
        except OSError:  # this namespace has no such number
            continue
        return number != NOBODY
    raise PermissionError("root found no other user in its namespace that it could become")


def _count_threads() -> int:
    """Count the threads of this machine, a bound on those of this user."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def _end_first_without_memory() -> None:
    """Have the system end this process before others when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # read-only in some containers
        pass


def _read_exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            sys.exit("the program is cut off")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
