"""Code of the user, named as `path/to/file.py:name` or `module:name`: found, loaded, explained.

Its folder goes to the end of the path, so that nothing in it can take the place of an installed
package, nor of one of ours: many a project has a folder `configs/`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import SettingsError

ROOT = Path(__file__).parents[1]
"""The folder that has our packages."""

looked_in: list[Path] = []
"""Folders of the settings files that this process has read, the last first: what they name is
looked for there, and then in the folder in which the command is typed."""

PACKAGES = ("actors", "agents", "broker", "buffer", "configs", "console", "learner")


def source_of(name: str, *, setting: str) -> Path:
    """Return the file that defines what `name` names; for a module `a.b`, `a` is imported.

    A file need not exist. For a module, the current folder goes to the end of `sys.path`.

    Raises:
        SettingsError: There is no such module.
    """
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser()
    _add_to_path(Path.cwd())
    try:
        spec = importlib.util.find_spec(place)
    except Exception:  # noqa: BLE001 - `a.b` runs `a`, which is the user's: it cannot be imported
        spec = None
    if spec is None or spec.origin is None:
        raise SettingsError(
            f"{setting} must be in an importable module, got {name!r}; there is no module "
            f"{place!r} on this machine: install it, or name a file, as path/to/file.py:name"
        )
    return Path(spec.origin)


def beside(name: str, folder: Path) -> str:
    """Make the name of a file, or of something in one, absolute if the file lies in a folder.

    Any other name is returned as it is: it is relative to the current folder, or names no file.

    Args:
        name: A path, `path/to/file.py:name`, or anything else.
        folder: Folder of the settings file with the name.
    """
    place, colon, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        place, colon, attribute = name, "", ""
    try:
        path = Path(place).expanduser()
        if not place or path.is_absolute() or not (folder / path).exists():
            return name
    except (OSError, RuntimeError):  # not a file name, or the home of an unknown user
        return name
    return f"{(folder / path).absolute()}{colon}{attribute}"


def missing(path: Path | str) -> str:
    """Describe where a missing file was looked for."""
    place = Path(path).expanduser()
    if place.is_absolute():
        return f"there is no {place}"
    here = [folder / place for folder in (*looked_in, Path.cwd())]
    return "there is no " + " and no ".join(
        dict.fromkeys(str(place) for place in here if not place.exists())
    )


def load_user_code(name: str, *, setting: str, kind: str) -> Any:
    """Import the function or class that `name` names; its module is run, a file each time anew.

    The folder of the file, or the current one, goes to the end of `sys.path`.

    Args:
        name: Name as a person wrote it.
        setting: Setting that has the name, such as `run.reward`.
        kind: Kind of object that is wanted, such as `function`.

    Raises:
        SettingsError: The file or module cannot be loaded, or has no such name.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        form = f"path/to/file.py:{kind} or module:{kind}"
        raise SettingsError(f"{setting} must be {form}, got {name!r}; add the {kind}")
    module = _load_file(name, setting) if place.endswith(".py") else _load_module(name, setting)
    loaded = getattr(module, attribute, None)
    if not callable(loaded):
        defined = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        names = ", ".join(defined) or "none"
        raise SettingsError(f"{setting} must be a {kind} of {place}, got {name!r}; it has {names}")
    return loaded


def packaged(group: str) -> dict[str, EntryPoint]:
    """Find what installed packages register under a group of entry points, as `package/name`."""
    return {
        f"{point.dist.name}/{point.name}": point
        for point in entry_points(group=group)
        if point.dist is not None
    }


def load_packaged(name: str, *, setting: str, group: str) -> Any:
    """Import what an installed package registers as an entry point.

    Args:
        name: `package/name` as a person wrote it; case, `-`, `_` and `.` in the package are alike.
        setting: Setting that has the name.
        group: Group of entry points.

    Raises:
        SettingsError: No installed package registers it, or it cannot be imported.
    """
    point = find_packaged(name, setting, group)
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"{setting} must be importable, got {name!r}, which is {point.value}; "
            f"{explain(error)}; install another release of {name.partition('/')[0]}"
        ) from error


def find_packaged(name: str, setting: str, group: str) -> EntryPoint:
    """Find an entry point by `package/name`; arguments as of `load_packaged`.

    Raises:
        SettingsError: No installed package registers it.
    """
    points = packaged(group)
    by_package = {_canonical(full_name): point for full_name, point in points.items()}
    point = by_package.get(_canonical(name))
    if point is None:
        names = ", ".join(sorted(points)) or "none"
        raise SettingsError(
            f"{setting} must be registered by an installed package under {group}, got {name!r}; "
            f"registered are {names}: install {name.partition('/')[0]} beside the learner, or "
            f"correct the name"
        )
    return point


def _canonical(name: str) -> str:
    package, _, function = name.partition("/")
    return f"{re.sub(r'[-_.]+', '-', package).lower()}/{function}"


def explain(error: BaseException) -> str:
    """Write an error of the user's code with the last line of that code that ran.

    Example:
        ZeroDivisionError: division by zero, at rewards.py:7: `return 1 / n`
    """
    place = user_code_place(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {error}{', at ' if place else ''}{place}"


def user_code_place(stack: Iterable[traceback.FrameSummary]) -> str:
    """Name the innermost line of a stack in the user's code, or nothing."""
    frames = [frame for frame in stack if _is_user_code(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""


def _is_user_code(file: str) -> bool:
    return (
        Path(file).is_file()
        and not Path(file).is_relative_to(sys.base_prefix)
        and "site-packages" not in Path(file).parts
        and not any(Path(file).is_relative_to(ROOT / package) for package in PACKAGES)
    )


def _load_file(name: str, setting: str) -> ModuleType:
    path = Path(name.rpartition(":")[0]).expanduser().resolve()
    if not path.is_file():
        raise SettingsError(
            f"{setting} must be an existing file, got {name!r}; "
            f"{missing(name.rpartition(':')[0])}: correct the path"
        )
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _add_to_path(path.parent)  # so that it can import what lies beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        hidden = [package for package in PACKAGES if (path.parent / package).is_dir()]
        if path.parent == ROOT or not isinstance(error, ImportError):
            hidden = []
        advice = "mend it"
        if hidden:
            advice = f"rename its {hidden[0]}/: Nyala has a package of that name"
        raise SettingsError(
            f"{setting} must be a file that can be imported, got {name!r}; "
            f"{explain(error)}; {advice}"
        ) from error
    return module


def _load_module(name: str, setting: str) -> ModuleType:
    place = name.rpartition(":")[0]
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"{setting} must be in an importable module, got {name!r}; {explain(error)}; "
            "a file is named by its path, such as path/to/file.py:name"
        ) from error


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
