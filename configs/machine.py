"""Facts about the machine of a process: GPUs, processor, memory, files, caches, libraries."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path, PurePosixPath

from .errors import SettingsError

# --------------------------------------------------------------------------------------------------
# Imports of large libraries.


@contextmanager
def without_collection() -> Iterator[None]:
    """Run imports without garbage collection, which takes a fifth of the time and frees nothing.

    Afterwards no object that exists by then is looked at by the collector again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# --------------------------------------------------------------------------------------------------
# Files that are kept for later runs.


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return our folder among a user's caches, which may not be there yet."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nyala"


COMPILED = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Environment variable that names a library's folder of compiled code -> its name in ours."""


def compiled_folders(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return each variable of `COMPILED` as it is set, else with our folder if we can write it.

    By itself inductor takes a folder that a restart of the machine empties.
    """
    place = user_cache(environment) / "compile"
    parent = next(folder for folder in (place, *place.parents) if folder.exists())
    ours = COMPILED if os.access(parent, os.W_OK) else {}
    folders = {variable: str(place / name) for variable, name in ours.items()}
    return folders | {name: environment[name] for name in COMPILED if environment.get(name)}


# --------------------------------------------------------------------------------------------------
# Packages: what is installed, and how to install what an extra of Nyala brings.


def installed_version(package: str) -> str | None:
    """Return the release of a package in this environment; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Write the command that installs what an extra of Nyala brings, beside it, in a checkout too.

    Args:
        extra: A name of `optional-dependencies` in pyproject.toml.
    """
    try:
        every = [requirement.replace("'", '"') for requirement in requires("nyala") or ()]
    except PackageNotFoundError:
        every = []
    wanted = [
        name.strip()
        for name, _, condition in (requirement.partition(";") for requirement in every)
        if f'extra == "{extra}"' in condition
    ]
    return shlex.join([sys.executable, "-m", "pip", "install", *(wanted or [f"nyala[{extra}]"])])


# --------------------------------------------------------------------------------------------------
# Files: their modes, how many may be open, room on a disk, paths of unix sockets.

MAX_SOCKET_PATH_BYTES = 107  # `sun_path` of Linux holds 108, the last of them 0
TEMPORARY = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # noqa: S108 - names are random
FULL_BYTES = 2**20  # nothing of a run goes on in less
FREE_SPACE = "free some space on the disk of {folder}, and the run, or its next start, goes on"


def raise_open_files() -> None:
    """Raise this process's limit of open files to its hard limit: strangers may connect, too."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def full_disk(folder: Path) -> str | None:
    """Return the error of a folder's disk that is full; None while it has room, or is not there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    if usage.free >= FULL_BYTES:
        return None
    return (
        f"the disk must have room, got {usage.free / 2**20:.2f} MiB free of "
        f"{usage.total / 2**20:,.0f}; {FREE_SPACE.format(folder=folder)}"
    )


def folder_of_sockets(name_bytes: int) -> Path:
    """Return a folder for temporary sockets: that of TMPDIR, or one with a shorter path.

    Args:
        name_bytes: Bytes of the longest name of a socket in the folder.

    Raises:
        SettingsError: There is no such folder.
    """
    first, most = Path(tempfile.gettempdir()), MAX_SOCKET_PATH_BYTES - 1 - name_bytes
    for folder in (first, *TEMPORARY):
        if len(os.fsencode(folder)) <= most and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise SettingsError(
        f"TMPDIR must be a folder whose path has at most {most} bytes, for sockets, got {first} "
        f"of {len(os.fsencode(first))}; set it to one that this user can write"
    )


# --------------------------------------------------------------------------------------------------
# The processor and the releases of libraries, which decide the last bits of a sum beside the code.
#
# Read without importing torch.

CPUINFO = Path("/proc/cpuinfo")
VECTORS = ("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16")
"""Beginnings of the names of instructions by which kernels are chosen."""
LIBRARIES = ("torch", "transformers", "numpy")


def arithmetic_hash() -> str:
    """Hash the processor's model, its vector instructions, and the releases of the libraries."""
    text = "\n".join([_processor(), *(f"{name} {version(name)}" for name in LIBRARIES)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor() -> str:
    if not CPUINFO.exists():
        return f"{platform.machine()} {platform.processor()}"
    vectors = " ".join(instructions(VECTORS))
    return f"{platform.machine()} {_cpuinfo().get('model name', '')} {vectors}"


def instructions(beginnings: tuple[str, ...]) -> list[str]:
    """List the processor's instructions whose names begin so; none where the system lists none."""
    fields = _cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return sorted(flag for flag in flags if flag.startswith(beginnings))


def _cpuinfo() -> dict[str, str]:
    """Read the fields of the first processor."""
    fields: dict[str, str] = {}
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


# --------------------------------------------------------------------------------------------------
# Memory of this machine, or of the container or control group that this process is in.

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def memory_of_machine() -> int:
    """Return the bytes of memory that processes may use here together."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *_limits_of_groups()])


def _limits_of_groups() -> Iterator[int]:
    """Read the limits of this process's group and of all around it, of both versions of cgroups.

    In a container its own group may be the root, whatever its name is outside.
    """
    try:
        groups = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in groups:
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = GROUPS / "memory", "memory.limit_in_bytes"
        elif not controllers:
            root, name = GROUPS, "memory.max"
        else:
            continue
        inner = PurePosixPath(place.lstrip("/"))
        for folder in (inner, *inner.parents):
            with suppress(OSError):
                limit = (root / folder / name).read_text(encoding="utf-8").strip()
                if limit.isdecimal():
                    yield int(limit)


# --------------------------------------------------------------------------------------------------
# Memory and processor time of this process and all that it started: its process group, and the
# children of that in groups of their own.

PROCESSES = Path("/proc")
LOOK_EVERY_S = 10.0  # a look reads a file of each process of the machine


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and processor time of a process group."""

    memory_bytes: int
    """Resident; what processes share, here and elsewhere, counts by its part in each of them."""
    cores: float
    """Processor seconds in each second since the look before."""


class UsageMeter:
    """Measures this process's group and its children, at most as often as figures are read."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._bytes, self._cpu_s = _used_by_tree(os.getpgrp())
        self._cores = 0.0

    def read_usage(self) -> Usage:
        """Return the figures, which are measured again when they are `LOOK_EVERY_S` old."""
        passed_s = self._clock() - self._looked_at
        if passed_s >= LOOK_EVERY_S:
            before_s = self._cpu_s
            self._bytes, self._cpu_s = _used_by_tree(os.getpgrp())
            # A process that ended takes its seconds along where nobody waited for it.
            self._cores = max(0.0, self._cpu_s - before_s) / passed_s
            self._looked_at = self._clock()
        return Usage(self._bytes, self._cores)


def _used_by_tree(group: int) -> tuple[int, float]:
    """Return bytes and processor seconds, those of children that were waited for included."""
    rows: dict[int, list[int]] = {}
    children: dict[int, list[int]] = {}
    for path in PROCESSES.glob("[0-9]*/stat"):
        try:
            # The name of a program may have spaces and brackets of its own.
            text = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:  # it has just ended
            continue
        fields = [int(number) for number in text.split()[1:22]]
        if len(fields) == 21:
            rows[int(path.parent.name)] = fields
            children.setdefault(fields[0], []).append(int(path.parent.name))
    members: set[int] = set()
    waiting = [process for process, fields in rows.items() if fields[1] == group]
    while waiting:
        process = waiting.pop()
        if process not in members:
            members.add(process)
            waiting += children.get(process, ())
    ticks = sum(sum(rows[process][10:14]) for process in members)
    used = sum(_memory_of(process, rows[process][20]) for process in members)
    return used, ticks / os.sysconf("SC_CLK_TCK")


def _memory_of(process: int, pages: int) -> int:
    """Return a process's own bytes and its part of shared ones; if unknown, all of its pages."""
    try:
        rollup = (PROCESSES / str(process) / "smaps_rollup").read_text(encoding="utf-8")
        return (
            next(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:") << 10
        )
    except (OSError, StopIteration):  # it has just ended, or is another user's
        return pages * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------------------------------
# GPUs of this machine, as NVIDIA's driver lists them; and why torch sees none of them.
#
# Asks `nvidia-smi`, which needs no CUDA and leaves a process free to fork.

QUERY_TIMEOUT_S = 20.0  # nvidia-smi takes seconds where the driver must be woken first
LEAST_DRIVERS = {12: 525, 13: 580}
"""Oldest driver of each CUDA of torch (docs.nvidia.com, "CUDA Compatibility")."""


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return [gpu.strip() for gpu in limited.split(",") if gpu.strip() not in {"", "-1"}]
    return query_gpus("index")


def query_gpus(field: str) -> list[str]:
    """Ask the driver for one field of every GPU, or several with commas; a line for each GPU.

    Empty without a driver, or if it fails or does not answer within `QUERY_TIMEOUT_S`.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # a driver that hangs has no GPU for us
        return []
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def gpu_left_out(device: str, cuda: str | None) -> str | None:
    """Write the error of a learner whose torch sees no GPU beside GPUs that the driver lists.

    Args:
        device: `learner.device`.
        cuda: Version that torch is built for; None = it is a build for CPUs.

    Returns:
        The error; None where there is none: the driver lists no GPU, or we may use none.
    """
    names = query_gpus("name")
    if not names or not visible_gpus():
        return None
    return (
        f"learner.device must be cpu to train without this machine's {len(names)} GPU(s), got "
        f"{device}: nvidia-smi lists {names[0]}, and {_why_no_gpu(cuda)}, "
        f"or set learner.device: cpu"
    )


def _why_no_gpu(cuda: str | None) -> str:
    """Describe why torch sees no GPU, and what to do."""
    if cuda is None:
        return "torch is a build for CPUs; set up with PROFILE=cuda ./run setup"
    versions = query_gpus("driver_version")
    major = versions[0].partition(".")[0] if versions else ""
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if major.isdigit() and int(major) < least:
        return f"CUDA {cuda} needs driver {least} or newer, got {versions[0]}; update the driver"
    return (
        f"torch, built for CUDA {cuda}, sees none; find out why with `python -m "
        f"torch.utils.collect_env`"
    )
