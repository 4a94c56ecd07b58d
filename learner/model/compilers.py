"""Checks for the compilers of code that is made while a model runs.

`torch.compile` calls them for `learner.compile`, and Triton for the kernels of this folder. Where
Triton cannot build them, torch's own operators are used.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from configs.errors import SettingsError


def check_compiler(device_type: str) -> None:
    """Find what inductor calls: a C++ compiler on a CPU, and a C compiler for Triton on a GPU.

    Raises:
        SettingsError: No compiler is installed.
    """
    names = _names(device_type)
    if not _is_installed(names):
        raise SettingsError(
            f"learner.compile must be false without a compiler, got true; none of {names} is "
            "installed: install one, or set learner.compile to false"
        )


@cache
def has_kernels(device_type: str) -> bool:
    """Whether Triton can build its kernels for a device: they are launched by a module in C."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    can_build = _is_installed(_names(device_type)) and headers.exists()
    return device_type == "cuda" and can_build and find_spec("triton") is not None


def _names(device_type: str) -> list[str]:
    if device_type == "cuda":
        return [os.environ.get("CC", "gcc"), "clang"]
    return [os.environ.get("CXX", "g++")]


def _is_installed(names: list[str]) -> bool:
    return any(shutil.which(name) for name in names)
