"""System calls that a program in the sandbox may make: those of computing, and no others.

An allow-list: what is not named here fails with EPERM, whatever the kernel learns in future. There
is no call that starts a process, opens a file for writing, makes a socket, names another process,
or changes what this one may do; some are allowed with certain arguments alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import termios

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
)  # others have the kernel send signals to whom one names
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
    code = [_load(4), _jump(AUDIT_ARCH_X86_64, 1, 0), _return(KILL), _load(0)]
    for number in COMPUTING.values():
        code += [_jump(number, 0, 1), _return(ALLOW)]
    code += [_jump(CLONE3, 0, 1), _return(MISSING)]
    code += _allow_if(2, argument=1, mask=READ_ONLY, values=(0,))  # open
    code += _allow_if(257, argument=2, mask=READ_ONLY, values=(0,))  # openat
    code += _allow_if(56, argument=0, mask=CLONE_THREAD | NEW_NAMESPACES, values=(CLONE_THREAD,))
    code += _allow_if(62, argument=0, values=(pid,))  # kill
    code += _allow_if(234, argument=0, values=(pid,))  # tgkill
    code += _allow_if(302, argument=0, values=(0, pid))  # prlimit64
    code += _allow_if(53, argument=0, values=(AF_UNIX,))  # socketpair
    code += _allow_if(72, argument=1, values=HARMLESS_FCNTL)
    code += _allow_if(16, argument=1, values=HARMLESS_IOCTL)
    return b"".join([*code, _return(REFUSE)])


def _allow_if(
    number: int, *, argument: int, values: tuple[int, ...], mask: int = _EVERY_BIT
) -> list[bytes]:
    """Allow a call whose argument, where the mask has ones, is one of some values."""
    checks = [_load(16 + 8 * argument), struct.pack("HBBI", 0x54, 0, 0, mask)]
    for value in values:
        checks += [_jump(value, 0, 1), _return(ALLOW)]
    checks.append(_return(REFUSE))
    return [_jump(number, 0, len(checks)), *checks]


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(value: int, if_equal: int, if_not: int) -> bytes:
    return struct.pack("HBBI", 0x15, if_equal, if_not, value)


def _return(action: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, action)
