"""The kernels of layers, run by Triton's interpreter on a CPU, and what they and torch launch."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from learner.model import fused

NAME = "learner.model.kernels"
KERNELS = (
    "_norm_forward",
    "_norm_backward",
    "_rotate",
    "_gate_forward",
    "_gate_backward",
)


@contextmanager
def interpreted_kernels() -> Iterator[ModuleType]:
    """Import them, and Triton, anew: it is then that the interpreter is chosen."""
    usual = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_of_triton(name)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            kernels = importlib.import_module(NAME)
            patch.setattr(fused, "_kernels", lambda: kernels)
            patch.setattr(fused, "has_kernels", lambda _: True)
            yield kernels
    finally:
        for name in [*sys.modules]:
            if _is_of_triton(name):
                del sys.modules[name]
        sys.modules.update(usual)


def _is_of_triton(name: str) -> bool:
    """Whether it is of Python: a compiled module is there once for a process."""
    return name == NAME or (f"{name}.".startswith("triton.") and "_C" not in name)


class Launches(TorchDispatchMode):
    """Counts operators of torch that compute or copy, those within the interpreter left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one, and count it where its result is no view and not left unwritten."""
        made = func(*args, **kwargs or {})
        name = str(func).split(".")[1]
        if not func.is_view and not name.startswith(
            ("empty", "new_empty", "detach", "_unsafe_view")
        ):
            self.counts[name] += 1
        return made


@contextmanager
def counted_launches(kernels: ModuleType) -> Iterator[Counter[str]]:
    """Count the operators of torch, and each kernel once."""
    launches = Launches()
    with (
        ExitStack() as counted,
        launches,
    ):
        for name in KERNELS:
            counter = _Counted(getattr(kernels, name), launches)
            counted.enter_context(mock.patch.object(kernels, name, counter))
        yield launches.counts


class _Counted:
    """A kernel, whose launches are counted."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._launches.counts[self._kernel.fn.__name__] += 1
            before = self._launches.counts.copy()
            self._kernel[grid](*args, **kwargs)
            self._launches.counts.clear()
            self._launches.counts.update(before)

        return launch
