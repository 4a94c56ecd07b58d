"""Checks of the machine alone: Python, cards, shared memory, disk, open files, default ports."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections import Counter
from importlib.metadata import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from broker.weights.shared_memory import SHARED_MEMORY
from configs.errors import SettingsError
from configs.machine.gpus import query_gpus
from configs.settings import BrokerSettings, LearnerSettings
from console.run.checks.addresses import check_address
from console.run.checks.check import GIB, Check, Doubt, sized
from console.run.checks.devices import check_devices
from console.run.redis_server import find_binary

from .packages import package_checks

GROUP = "machine"
LEAST_SHARED_BYTES = GIB
"""Torch and vLLM use some besides the weights; a container's own default is 64 MiB."""
LEAST_DISK_BYTES, SPARE_DISK_BYTES = GIB, 10 * GIB
LEAST_OPEN_FILES = 4096
"""Two for each of a few hundred actors at a broker, with files and sockets of its own."""


def machine_checks(folder: Path, *, has_settings: bool) -> list[Check]:
    """List them.

    Args:
        folder: Where runs are kept.
        has_settings: Others look at what the settings want of addresses and cards.
    """
    checks = [
        Check(GROUP, "Python", check_python),
        Check(GROUP, "cards", check_cards, limit_s=60),
        Check(GROUP, "shared memory", check_shared_memory),
        Check(GROUP, "disk", lambda: check_disk(folder)),
        Check(GROUP, "open files", check_open_files),
    ]
    if has_settings:
        return [*checks, *package_checks()]
    return [
        *checks,
        Check(GROUP, "devices", lambda: check_devices(LearnerSettings()), limit_s=150),
        Check(GROUP, "Redis server", lambda: str(find_binary())),
        Check(GROUP, "default port", check_default_port),
        *package_checks(),
    ]


def check_python() -> str:
    """It is one for which Nyala is made.

    Raises:
        SettingsError: It is not.
    """
    wanted, found = metadata("nyala")["Requires-Python"], platform.python_version()
    if not SpecifierSet(wanted).contains(found):
        raise SettingsError(
            f"Python must be {wanted}, got {found} ({sys.executable}); run ./run setup with "
            f"PYTHON=/path/to/another"
        )
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{found}, {sys.executable}; {cores} cores, {sized(memory)} of memory"


def check_cards() -> str:
    """The driver's version and its cards."""
    names = Counter(query_gpus("name"))
    if not names:
        return "none: nvidia-smi is not here or lists no GPU, so learner and actors take the CPU"
    listed = ", ".join(f"{count} x {name}" for name, count in names.items())
    sizes = [int(text) for text in query_gpus("memory.total") if text.isdigit()]
    return f"{listed}, {min(sizes, default=0)} MiB, driver {query_gpus('driver_version')[0]}"


def check_shared_memory() -> str | Doubt:
    """Shared memory can be written, and is not a container's default.

    Raises:
        SettingsError: It cannot be written.
    """
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise SettingsError(
            f"{SHARED_MEMORY} must be a folder that this user can write, got none; mount a tmpfs "
            f"there (docker: --shm-size)"
        )
    usage = shutil.disk_usage(SHARED_MEMORY)
    if usage.free < LEAST_SHARED_BYTES:
        return Doubt(
            f"{SHARED_MEMORY} should have {sized(LEAST_SHARED_BYTES)} free, got "
            f"{sized(usage.free)} of {sized(usage.total)}; enlarge it (docker: --shm-size, or "
            f"--ipc=host), or remove what fills it"
        )
    return f"{sized(usage.free)} of {sized(usage.total)} free"


def check_disk(folder: Path) -> str | Doubt:
    """The disk that runs are kept on can be written and has room.

    Raises:
        SettingsError: It cannot, or it is full.
    """
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    if not os.access(place, os.W_OK):
        raise SettingsError(
            f"run.directory must be a folder that this user can write, got {place}; choose another "
            f"with --set run.directory=FOLDER"
        )
    wanted = LEAST_DISK_BYTES if usage.free < LEAST_DISK_BYTES else SPARE_DISK_BYTES
    text = (
        f"the disk of {place} must have {sized(wanted)} free, got {sized(usage.free)} of "
        f"{sized(usage.total)}; free some space, or choose another with --set run.directory=FOLDER"
    )
    if usage.free < LEAST_DISK_BYTES:
        raise SettingsError(text)
    if usage.free < SPARE_DISK_BYTES:
        return Doubt(text)
    return f"{sized(usage.free)} of {sized(usage.total)} free at {place}"


def check_open_files() -> str | Doubt:
    """A process may open as many files as a fleet's broker needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return Doubt(
            f"the limit of open files should be >= {LEAST_OPEN_FILES} for a broker of many actors, "
            f"got {soft} (at most {hard} without root); `ulimit -n {LEAST_OPEN_FILES}` before "
            f"nyala, or LimitNOFILE of its service"
        )
    return f"at most {soft} at a time"


def check_default_port() -> str | Doubt:
    """The broker's default address is free: another run, or another program, may have it."""
    endpoint = BrokerSettings().endpoint
    try:
        check_address("broker.endpoint", endpoint)
    except SettingsError as error:
        return Doubt(str(error))
    return f"{endpoint} is free"
