"""The kernels of layers and logits by Triton's interpreter, and what they and torch launch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.model import fused, logits, policy
from tests.learner.support.fresh_kernels import LAYERS, LOGITS, fresh_kernels

FREE = (
    *("empty", "new_empty", "detach", "_unsafe_view", "promote_types", "set_data"),
    *("_record_function", "scalar_tensor", "_local_scalar"),
)
"""Beginnings of the names of operators that launch nothing, beside views."""


@contextmanager
def interpreted_kernels() -> Iterator[ModuleType]:
    """Have layers computed by kernels on a CPU, too."""
    with (
        fresh_kernels(LAYERS, LOGITS, interpreted=True) as kernels,
        mock.patch.object(fused, "_kernels", return_value=kernels),
        mock.patch.object(fused, "has_kernels", return_value=True),
        mock.patch.object(policy, "has_kernels", return_value=True),
    ):
        yield kernels


@contextmanager
def interpreted_logits() -> Iterator[None]:
    """Have logits computed by kernels too, within the above."""
    with mock.patch.object(logits, "kernels_for", return_value=sys.modules[LOGITS]):
        yield


class Launches(TorchDispatchMode):
    """Counts operators of torch that compute or copy, and calls of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        """Their names, and where they were called: a method, or a node of autograd."""

    @property
    def counts(self) -> Counter[str]:
        """Add up those of a name."""
        found: Counter[str] = Counter()
        for (name, _), count in self.places.items():
            found[name] += count
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one, and count it where its result is no view and not left unwritten."""
        made = func(*args, **kwargs or {})
        name = str(func).split(".")[1]
        if name.startswith(FREE):
            if isinstance(made, torch.Tensor) and made.is_floating_point() and "empty" in name:
                made.fill_(1)  # what a kernel that is not run leaves
        elif not func.is_view:
            # Its derivative is zeros, which the gradient is copied to.
            self.add(name, 2 if name in {"select_backward", "slice_backward"} else 1)
        return made

    def add(self, name: str, number: int = 1) -> None:
        """Count some."""
        self.places[name, _place()] += number


def _place() -> str:
    """Name the method that calls, or the node whose backward pass has none."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if name == "_engine_run_backward":
            break
        if {"learner", "models", "optim", "fsdp"} & {*path.parts}:
            return f"{path.parent.name}/{path.stem} {name}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return f"backward of {node.name() if node else 'nothing'}"


@contextmanager
def counted_launches(*modules: ModuleType) -> Iterator[Launches]:
    """Count operators of torch and calls of the kernels of modules, which do nothing meanwhile."""
    launches = Launches()
    with ExitStack() as counted, launches:
        for module in modules:
            for name, kernel in [*vars(module).items()]:
                if hasattr(kernel, "fn"):
                    counter = _Counted(name, launches)
                    counted.enter_context(mock.patch.object(module, name, counter))
        yield launches


class _Counted:
    """A kernel that is counted instead."""

    def __init__(self, name: str, launches: Launches) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: self._launches.add(self._name)
