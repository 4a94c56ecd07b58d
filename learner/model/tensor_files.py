"""Tensors in safetensors files, whole or cut into pieces, read box by box.

Whoever holds a piece of a tensor asks for just that, wherever the files were cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Box(NamedTuple):
    """Where a rank's piece lies in a tensor."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    offset: tuple[int, ...]


def box_of(tensor: Tensor) -> Box:
    """Compute where this rank's piece of a tensor lies."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(whole, (0,) * len(whole))
    _, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    return Box(whole, tuple(int(start) for start in offset))


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a tensor; it shares the tensor's memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorFiles:
    """The tensors of several opened files; a tensor may have pieces in more than one."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[Any, tuple[int, ...]]]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """By their names in the format."""

    def add(self, file: Any, boxes: Mapping[str, Box]) -> None:
        """Add what a file has.

        Args:
            file: As `safe_open` returns it.
            boxes: Of its pieces; all others are whole tensors.
        """
        for name in file.keys():  # noqa: SIM118 - not a mapping
            piece = file.get_slice(name)
            shape = tuple(piece.get_shape())
            whole, offset = boxes.get(name, (shape, (0,) * len(shape)))
            self._pieces[name].append((file, tuple(offset)))
            self.shapes[name] = tuple(whole)
            self.dtypes[name] = piece.get_dtype()

    @torch.no_grad()
    def read(self, name: str, local: Tensor, offset: tuple[int, ...]) -> int:
        """Fill `local`, whose first element is at `offset`, from the pieces that overlap it.

        Returns:
            The elements found; fewer than it has where pieces are missing.
        """
        filled = 0
        for file, at in self._pieces[name]:
            piece = file.get_slice(name)
            starts = [max(a, b) for a, b in zip(at, offset, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(at, piece.get_shape(), offset, local.shape, strict=True)
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            span = list(zip(starts, ends, strict=True))
            theirs = tuple(slice(s - a, e - a) for (s, e), a in zip(span, at, strict=True))
            ours = tuple(slice(s - b, e - b) for (s, e), b in zip(span, offset, strict=True))
            part = piece[theirs] if theirs else file.get_tensor(name)
            local[ours].copy_(part)
            filled += part.numel()
        return filled
