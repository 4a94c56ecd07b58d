"""Kernels imported anew: for Triton's interpreter, or compiled for a card that is not here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

LAYERS, LOGITS = "learner.model.kernels", "learner.model.logit_kernels"


@contextmanager
def fresh_kernels(*names: str, interpreted: bool) -> Iterator[ModuleType]:
    """Import modules and Triton anew, since it is then that the interpreter is chosen.

    Yields:
        The first one.
    """
    usual = {each: sys.modules.pop(each) for each in [*sys.modules] if _is_of_triton(each, names)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            if interpreted:
                patch.setenv("TRITON_INTERPRET", "1")
            modules = [importlib.import_module(name) for name in names]
            yield modules[0]
    finally:
        for each in [*sys.modules]:
            if _is_of_triton(each, names):
                del sys.modules[each]
        sys.modules.update(usual)


def _is_of_triton(each: str, names: tuple[str, ...]) -> bool:
    """Whether it is of Python: a compiled module is there once for a process."""
    return each in names or (f"{each}.".startswith("triton.") and "_C" not in each)


@contextmanager
def compiled_kernels(name: str) -> Iterator[ModuleType]:
    """Have launches of a module's kernels by `warmup` compile them, for a card of the H100's kind.

    That is all that a launch on the card does before it loads the code.
    """
    with fresh_kernels(name, interpreted=False) as kernels:
        runtime, compiler = map(
            importlib.import_module, ("triton.runtime", "triton.backends.compiler")
        )
        runtime.driver.set_active(_Card(compiler.GPUTarget("cuda", 90, 32)))
        yield kernels


class _Card:
    """A driver that knows what code is for, and can do nothing with it."""

    def __init__(self, target: Any) -> None:
        self.get_current_target: Callable[[], Any] = lambda: target
        self.get_current_device: Callable[[], int] = lambda: 0
        self.get_current_stream: Callable[[int], int] = lambda _: 0
        self.get_active_torch_device: Callable[[], torch.device] = lambda: torch.device("cpu")
