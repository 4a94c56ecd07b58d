"""Files that a program in the sandbox can read: Python's standard library and shared libraries.

Two ways, of which either is enough. In namespaces of its own it has a file system with nothing else
in it. Where those are not to be had, Landlock refuses to open anything else; what exists can then
still be found out by name (`stat`).
"""

from __future__ import annotations

import os
import struct
import sys

from . import kernel

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
    """Return what stays readable."""
    library = os.path.dirname(os.__file__)
    own = os.path.join(sys.base_prefix, "lib")
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
    return [path for path in dict.fromkeys((library, own, *system)) if os.path.exists(path)]


def enter_namespaces(paths: list[str], *, as_root: bool) -> None:
    """Give this process a file system of its own with these paths, read-only, and no network.

    Args:
        paths: Absolute.
        as_root: The process may do so without a user namespace.

    Raises:
        OSError: The kernel refuses a step.
    """
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(ISOLATED if as_root else ISOLATED | CLONE_NEWUSER)
    if not as_root:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    kernel.mount("none", "/", "", MS_REC | MS_PRIVATE)
    kernel.mount("none", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    for path in paths:
        place = NEW_ROOT + path
        os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
        if not os.path.isdir(path):
            _write(place, "")
        kernel.mount(path, place, "", MS_BIND | MS_REC)
    os.chdir(NEW_ROOT)
    kernel.system_call("pivot_root", kernel.PIVOT_ROOT, b".", b".")
    kernel.unmount(".", MNT_DETACH)
    os.chdir("/")
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    arguments = (AT_FDCWD, b"/", AT_RECURSIVE, wanted, len(wanted))
    kernel.system_call("a read-only view", kernel.MOUNT_SETATTR, *arguments)


def restrict_with_landlock(paths: list[str]) -> None:
    """Have the kernel refuse to open other files than these, to write any, and to connect.

    Raises:
        OSError: The kernel has no Landlock, or has it switched off.
    """
    version = kernel.system_call("Landlock", LANDLOCK_CREATE, None, 0, 1)
    rights = FILE_RIGHTS[max(known for known in FILE_RIGHTS if known <= version)]
    handled = [(1 << rights) - 1]
    handled += [3] if version >= 4 else []  # bind and connect of TCP
    handled += [3] if version >= 6 else []  # abstract sockets, signals
    request = struct.pack(f"{len(handled)}Q", *handled)
    rules = kernel.system_call("Landlock", LANDLOCK_CREATE, request, len(request), 0)
    for path in paths:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        may = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        kernel.system_call("Landlock", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", may, folder), 0)
        os.close(folder)
    kernel.system_call("Landlock", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
