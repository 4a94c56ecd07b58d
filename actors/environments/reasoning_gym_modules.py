"""Import of a single dataset of reasoning-gym.

The package's own `__init__` imports all of its hundred datasets, and with them sympy and
matplotlib. Here it and the packages of its subjects stay unexecuted until something is looked up
in them that is not one of their modules, and only the module that registers the wanted dataset is
imported. A dataset whose module needs names of the whole package takes all of it.

What the package asks for and its locks leave out, as it would have to be compiled
(`requirements/datasets.txt`), is asked for by the datasets that import it.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from importlib.metadata import requires
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from configs.errors import SettingsError

PACKAGE = "reasoning_gym"
REGISTERS = re.compile(r'(?:DATASET_NAME\s*=|register_dataset\()\s*"([^"]+)"')
"""A module that registers a dataset, and its name."""
_IMPORTING = RLock()


class _UnexecutedPackage(ModuleType):
    """A package whose `__init__` is executed when one of its names is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in {"__all__", "__version__"}:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        _execute(self)
        return getattr(self, name)


def import_dataset(name: str) -> ModuleType:
    """Import what makes the dataset `name`, and return `reasoning_gym.factory`.

    A name that no module registers is missing in its `DATASETS` afterwards.

    Raises:
        SettingsError: The dataset needs a package that is not installed.
    """
    with _IMPORTING, warnings.catch_warnings():
        # Dependencies of the package warn of their own syntax when they are first compiled.
        warnings.simplefilter("ignore")
        try:
            return _import(name, _find_module(name))
        except ModuleNotFoundError as error:
            raise SettingsError(_lacking(name, error)) from error


def dataset_names() -> list[str]:
    """List all datasets, by the sources of the package."""
    return sorted({name for text in map(_read, _sources()) for name in REGISTERS.findall(text)})


def _import(name: str, module: str | None) -> ModuleType:
    """Import the module that registers a dataset, if one does, and the factory."""
    is_alone = _import_alone(module or f"{PACKAGE}.factory")
    factory = importlib.import_module(f"{PACKAGE}.factory")
    if not is_alone or (module is not None and name not in factory.DATASETS):
        _execute(importlib.import_module(PACKAGE))
    return factory


def _lacking(name: str, error: ModuleNotFoundError) -> str:
    """Write the error of a dataset that needs a package, with the version that it asks for."""
    wanted = [text for text in requires("reasoning-gym") or () if text.startswith(str(error.name))]
    package = wanted[0] if wanted else error.name
    return (
        f"run.environment_settings.dataset must be one whose packages are installed, got {name}, "
        f"which needs {package}; {sys.executable} -m pip install '{package}' (to compile some of "
        f"them, Debian, Ubuntu: apt install gcc python3-dev)"
    )


def _find_module(name: str) -> str | None:
    """Return the module that registers `name`; None = none, or one that may need all the others."""
    # Most files are called as their dataset is: the others are read only where that finds nothing.
    for path in sorted(_sources(), key=lambda path: path.stem != name):
        if name in REGISTERS.findall(_read(path)):
            folder = next(above for above in path.parents if above.name == PACKAGE)
            return ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts))
    return None


def _sources() -> list[Path]:
    """List the modules of its subjects."""
    spec = find_spec(PACKAGE)
    assert spec is not None, PACKAGE
    assert spec.origin is not None, PACKAGE
    return list(Path(spec.origin).parent.glob("*/**/*.py"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _import_alone(module: str) -> bool:
    """Import a module without executing the packages above it; False = it needs more than that."""
    _place_parents(module)
    try:
        importlib.import_module(f"{PACKAGE}.coaching")  # first, as everywhere: it imports in a ring
        importlib.import_module(module)
    except ModuleNotFoundError:
        raise
    except ImportError:  # a name that the package's own `__init__` gives it
        return False
    return True


def _place_parents(module: str) -> None:
    """Make the packages above a module without executing them."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent in sys.modules:
            continue
        spec = find_spec(parent)
        assert spec is not None, parent
        package = module_from_spec(spec)
        package.__class__ = _UnexecutedPackage
        sys.modules[parent] = package
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], package)


def _execute(package: ModuleType) -> None:
    """Execute a package and those below it, where that has not been done."""
    below = f"{package.__name__}."
    modules = list(sys.modules.items())
    found = [package, *(module for name, module in modules if name.startswith(below))]
    unexecuted = [module for module in found if isinstance(module, _UnexecutedPackage)]
    for module in unexecuted:
        _finish(module)


def _finish(package: ModuleType) -> None:
    package.__class__ = ModuleType
    assert package.__spec__ and package.__spec__.loader, package.__name__
    package.__spec__.loader.exec_module(package)
