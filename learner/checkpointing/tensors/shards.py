"""Tensors of a checkpoint on disk: each rank writes its pieces, and reads any box of the whole.

    tensors-<rank>.safetensors    the pieces of one rank; a piece that is not the whole tensor has
                                  [shape of the whole, offset in it] under its name in the metadata

Whoever loads asks for boxes: with as many ranks as before each is one piece, with others it is put
together from several. Files are written by hand, because a digest is taken of the bytes on their
way; `safetensors` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.errors import CheckpointError
from learner.checkpointing.manifest import read_manifest
from learner.model.tensor_files import Box, TensorFiles, box_of, local_of

PREFIX, SUFFIX = "tensors-", ".safetensors"
CHUNK_BYTES = 2**24
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor."""

    local: Tensor
    box: Box


def is_written_here(tensor: Tensor, *, is_first: bool) -> bool:
    """Return whether this rank writes its piece: of equal ones, one rank does."""
    if not isinstance(tensor, DTensor):
        return is_first
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        not place.is_replicate() or at == 0
        for place, at in zip(tensor.placements, coordinate, strict=True)
    )


def encode_shards(pieces: Mapping[str, Piece]) -> Iterator[bytes | memoryview]:
    """Encode pieces as a safetensors file, in chunks."""
    header: dict[str, Any] = {}
    boxes: dict[str, Box] = {}
    end = 0
    for name, piece in pieces.items():
        begin, end = end, end + piece.local.numel() * piece.local.element_size()
        shape = tuple(piece.local.shape)
        header[name] = {
            "dtype": DTYPES[piece.local.dtype],
            "shape": shape,
            "data_offsets": (begin, end),
        }
        if shape != piece.box.whole:
            boxes[name] = piece.box
    header["__metadata__"] = {"boxes": json.dumps(boxes)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that tensors are aligned
    yield len(encoded).to_bytes(8, "little") + encoded
    for piece in pieces.values():
        flat = piece.local.contiguous().reshape(-1).view(torch.uint8)
        whole: memoryview = flat.numpy().data
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]


class Shards:
    """The tensors in a folder of shards, to be read box by box."""

    def __init__(self, folder: Path) -> None:
        """Open the files that the manifest lists, and read what is in them.

        Raises:
            CheckpointError: One of them is no such file.
        """
        self._folder = folder
        self._files = TensorFiles()
        for name in sorted(read_manifest(folder).digests):
            if not (name.startswith(PREFIX) and name.endswith(SUFFIX)):
                continue
            path = folder / name
            try:
                file = safe_open(str(path), framework="pt")
                boxes = json.loads(file.metadata()["boxes"])
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                raise CheckpointError(f"{path} must hold tensors, got: {error}") from error
            self._files.add(file, boxes)
        self.shapes = self._files.shapes
        self.dtypes = {name: TORCH_DTYPES[dtype] for name, dtype in self._files.dtypes.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's pieces of the named tensors into them.

        Raises:
            CheckpointError: The files do not hold all of them.
        """
        for name, tensor in tensors.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{self._folder} must hold {name} of shape {tuple(tensor.shape)}, got "
                    f"{self.shapes.get(name, 'none')}; it is of another model"
                )
            self._read_box(name, local_of(tensor), box_of(tensor).offset)

    def read_whole(self, name: str) -> Tensor:
        """Read one tensor whole."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self._read_box(name, whole, (0,) * whole.ndim)
        return whole

    def _read_box(self, name: str, local: Tensor, offset: tuple[int, ...]) -> None:
        filled = self._files.read(name, local, offset)
        if filled != local.numel():
            raise CheckpointError(
                f"{self._folder} must hold all of {name}, got {filled} of {local.numel()} elements "
                f"from {offset} on; a rank's file is missing"
            )
