"""Isolation of a process by the Linux kernel: namespaces, Landlock, a filter of system calls.

On Linux and x86_64, by system calls that Python has no function for. Called in the sandboxed
process by `entry.py`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import termios

MOUNT_SETATTR = 442
PIVOT_ROOT = 155
CAPSET = 126

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

_LIBC = ctypes.CDLL(None, use_errno=True)
_CAPABILITIES_V3 = 0x20080522


def system_call(what: str, number: int, *arguments: int | bytes | None) -> int:
    """Make a system call.

    Raises:
        OSError: The call failed; the text begins with `what`.
    """
    return _checked(what, _LIBC.syscall(ctypes.c_long(number), *map(_as_argument, arguments)))


def prctl(what: str, option: int, *arguments: int) -> None:
    """Set an attribute of this process.

    Raises:
        OSError: The kernel refuses the call; the text begins with `what`.
    """
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _checked(what, _LIBC.prctl(option, *map(ctypes.c_ulong, padded)))


def unshare(flags: int) -> None:
    """Move this process into new namespaces.

    Raises:
        OSError: The kernel refuses the call.
    """
    _checked("new namespaces", _LIBC.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or a folder a second time.

    Raises:
        OSError: The kernel refuses the call.
    """
    texts = [text.encode() for text in (source, target, kind)]
    result = _LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode())
    _checked(f"mount of {source}", result)


def unmount(target: str, flags: int) -> None:
    """Unmount a file system.

    Raises:
        OSError: The kernel refuses the call.
    """
    _checked(f"unmount of {target}", _LIBC.umount2(target.encode(), flags))


def drop_capabilities() -> None:
    """Give up all rights that a process may have beyond those of its user.

    Raises:
        OSError: The kernel refuses the call.
    """
    system_call("dropping capabilities", CAPSET, struct.pack("Ii", _CAPABILITIES_V3, 0), bytes(24))


def install_filter(instructions: bytes) -> None:
    """Filter every later system call of this process with a BPF program; it cannot be undone.

    Raises:
        OSError: The kernel refuses the call.
    """
    held = ctypes.create_string_buffer(instructions)
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(held))
    )
    prctl("a seccomp filter", PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _as_argument(argument: int | bytes | None) -> ctypes.c_long | bytes | None:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


# --------------------------------------------------------------------------------------------------
# System calls that a program in the sandbox may make: those of computing, and no others.
#
# An allow-list: a call that is not named here fails with EPERM, so also a call of future kernels.
# No call in the list starts a process, opens a file for writing, makes a socket, names another
# process, or changes the rights of this one; some calls are allowed with certain arguments alone.

AUDIT_ARCH_X86_64 = 0xC000003E

AF_UNIX = 1  # `socket` takes half as long to import as Python to start

ALLOW = 0x7FFF0000
KILL = 0x80000000
REFUSE = 0x00050000 | errno.EPERM
MISSING = 0x00050000 | errno.ENOSYS

CLONE3 = 435
"""Its flags are in memory, where no filter sees them: libraries then use `clone`."""
CLONE_THREAD = 0x10000
NEW_NAMESPACES = 0x7E020000 | 0x02000000

COMPUTING = {
    "read": 0,
    "write": 1,
    "close": 3,
    "stat": 4,
    "fstat": 5,
    "lstat": 6,
    "poll": 7,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "pread64": 17,
    "readv": 19,
    "writev": 20,
    "access": 21,
    "pipe": 22,
    "select": 23,
    "sched_yield": 24,
    "mremap": 25,
    "madvise": 28,
    "dup": 32,
    "dup2": 33,
    "pause": 34,
    "nanosleep": 35,
    "getitimer": 36,
    "alarm": 37,
    "setitimer": 38,
    "getpid": 39,
    "sendto": 44,
    "recvfrom": 45,
    "shutdown": 48,
    "getsockname": 51,
    "getsockopt": 55,
    "exit": 60,
    "uname": 63,
    "getcwd": 79,
    "umask": 95,
    "gettimeofday": 96,
    "getrlimit": 97,
    "getrusage": 98,
    "sysinfo": 99,
    "times": 100,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "getppid": 110,
    "getpgrp": 111,
    "rt_sigpending": 127,
    "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130,
    "sigaltstack": 131,
    "setrlimit": 160,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "getdents64": 217,
    "set_tid_address": 218,
    "restart_syscall": 219,
    "fadvise64": 221,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "epoll_wait": 232,
    "epoll_ctl": 233,
    "newfstatat": 262,
    "faccessat": 269,
    "pselect6": 270,
    "ppoll": 271,
    "set_robust_list": 273,
    "epoll_pwait": 281,
    "eventfd2": 290,
    "epoll_create1": 291,
    "dup3": 292,
    "pipe2": 293,
    "getcpu": 309,
    "getrandom": 318,
    "membarrier": 324,
    "statx": 332,
    "rseq": 334,
    "faccessat2": 439,
}

READ_ONLY = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
HARMLESS_FCNTL = (
    fcntl.F_DUPFD,
    fcntl.F_GETFD,
    fcntl.F_SETFD,
    fcntl.F_GETFL,
    fcntl.F_SETFL,
    fcntl.F_DUPFD_CLOEXEC,
)  # other commands can make the kernel send signals to another process
HARMLESS_IOCTL = (
    termios.TCGETS,
    termios.TIOCGWINSZ,
    termios.FIONREAD,
    termios.FIONBIO,
    termios.FIOCLEX,
    termios.FIONCLEX,
)

_EVERY_BIT = 0xFFFFFFFF


def filter_for(pid: int) -> bytes:
    """Return the BPF program for a process, which may send signals to itself alone."""
    code = [
        _load_word(4),
        _jump_if_equal(AUDIT_ARCH_X86_64, 1, 0),
        _return_action(KILL),
        _load_word(0),
    ]
    for number in COMPUTING.values():
        code += [_jump_if_equal(number, 0, 1), _return_action(ALLOW)]
    code += [_jump_if_equal(CLONE3, 0, 1), _return_action(MISSING)]
    code += _allow_if(2, argument=1, mask=READ_ONLY, values=(0,))  # open
    code += _allow_if(257, argument=2, mask=READ_ONLY, values=(0,))  # openat
    code += _allow_if(56, argument=0, mask=CLONE_THREAD | NEW_NAMESPACES, values=(CLONE_THREAD,))
    code += _allow_if(62, argument=0, values=(pid,))  # kill
    code += _allow_if(234, argument=0, values=(pid,))  # tgkill
    code += _allow_if(302, argument=0, values=(0, pid))  # prlimit64
    code += _allow_if(53, argument=0, values=(AF_UNIX,))  # socketpair
    code += _allow_if(72, argument=1, values=HARMLESS_FCNTL)
    code += _allow_if(16, argument=1, values=HARMLESS_IOCTL)
    return b"".join([*code, _return_action(REFUSE)])


def _allow_if(
    number: int, *, argument: int, values: tuple[int, ...], mask: int = _EVERY_BIT
) -> list[bytes]:
    """Allow a call whose argument, where the mask has ones, is one of some values."""
    checks = [_load_word(16 + 8 * argument), struct.pack("HBBI", 0x54, 0, 0, mask)]
    for value in values:
        checks += [_jump_if_equal(value, 0, 1), _return_action(ALLOW)]
    checks.append(_return_action(REFUSE))
    return [_jump_if_equal(number, 0, len(checks)), *checks]


def _load_word(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump_if_equal(value: int, if_equal: int, if_not: int) -> bytes:
    return struct.pack("HBBI", 0x15, if_equal, if_not, value)


def _return_action(action: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, action)


# --------------------------------------------------------------------------------------------------
# Files that a program in the sandbox can read: Python's standard library and shared libraries.
#
# Two ways, of which either is enough. In namespaces of its own, the program has a file system with
# nothing else in it. Where namespaces are not available, Landlock refuses to open any other file;
# the program can then still find out which files exist (`stat`).

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
ISOLATED = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

NEW_ROOT = "/sys"
"""Every Linux has this folder, and nothing of it is needed."""

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Landlock's version -> how many rights on files it knows."""


NAMESPACES = "namespaces"
VIEWS = (NAMESPACES, "landlock")
"""Ways to narrow the view, the better one first."""


def readable() -> list[str]:
    """Return the paths that stay readable."""
    library = os.path.dirname(os.__file__)
    of_prefix = os.path.join(sys.base_prefix, "lib")
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
    return [path for path in dict.fromkeys((library, of_prefix, *system)) if os.path.exists(path)]


def enter_namespaces(paths: list[str], *, as_root: bool) -> None:
    """Give this process a file system of its own with these paths, read-only, and no network.

    Sets the umask to 022 and the working directory to the new root.

    Args:
        paths: Absolute paths that stay readable.
        as_root: The process has the rights without a user namespace.

    Raises:
        OSError: The kernel refuses a step.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(ISOLATED if as_root else ISOLATED | CLONE_NEWUSER)
    if not as_root:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("none", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.umask(0o022)  # the actor's umask is narrower, and the program has another user
    for path in paths:
        place = NEW_ROOT + path
        os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
        if not os.path.isdir(path):
            _write(place, "")
        mount(path, place, "", MS_BIND | MS_REC)
    os.chdir(NEW_ROOT)
    system_call("pivot_root", PIVOT_ROOT, b".", b".")
    unmount(".", MNT_DETACH)
    os.chdir("/")
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    arguments = (AT_FDCWD, b"/", AT_RECURSIVE, wanted, len(wanted))
    system_call("a read-only view", MOUNT_SETATTR, *arguments)


def restrict_with_landlock(paths: list[str]) -> None:
    """Make the kernel refuse to open other files than these, to write to files, and to connect.

    Raises:
        OSError: The kernel has no Landlock, or Landlock is switched off.
    """
    version = system_call("Landlock", LANDLOCK_CREATE, None, 0, 1)
    rights = FILE_RIGHTS[max(listed for listed in FILE_RIGHTS if listed <= version)]
    handled = [(1 << rights) - 1]
    handled += [3] if version >= 4 else []  # bind and connect of TCP
    handled += [3] if version >= 6 else []  # abstract sockets, signals
    request = struct.pack(f"{len(handled)}Q", *handled)
    rules = system_call("Landlock", LANDLOCK_CREATE, request, len(request), 0)
    for path in paths:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        may = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        system_call("Landlock", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", may, folder), 0)
        os.close(folder)
    system_call("Landlock", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
