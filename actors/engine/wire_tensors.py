"""Staged weights as named tensors, and the messages about them to and from vLLM's workers.

A version is one flat file of canonical wire bytes. Nothing is copied: the tensors are views into a
private mapping of the file, which lives as long as they do. The receiver has checked the digest; a
layout that reaches outside the file is refused here.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from msgspec import Struct

from broker.protocol.manifest import TensorSpec
from configs.errors import WeightsError


class VersionFile(Struct, frozen=True):
    """A whole version in a file, as `VllmStepper` describes it to a worker of vLLM."""

    path: str
    num_bytes: int
    tensors: tuple[TensorSpec, ...]


class PreparationState(Struct, frozen=True):
    """How far a worker of vLLM is with the next version. Producer: `WorkerCalls`."""

    is_ready: bool
    way: str
    """How the worker will load the version."""
    fault: str = ""
    """What is wrong with the version's file; empty = nothing."""


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def named_tensors(
    path: Path, tensors: Sequence[TensorSpec], num_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (name, tensor) in the order of the manifest.

    Args:
        path: File of wire bytes.
        tensors: Layout of the file.
        num_bytes: Length that the file must have.

    Raises:
        WeightsError: the file cannot be read or does not agree with the layout.
    """
    return tensors_in(_map(path, num_bytes), tensors, num_bytes)


def tensors_in(
    memory: mmap.mmap | ctypes.Array[ctypes.c_char],
    tensors: Sequence[TensorSpec],
    num_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of mapped wire bytes, as `named_tensors` does.

    Raises:
        WeightsError: The bytes do not agree with the layout.
    """
    for spec in tensors:
        dtype = TORCH_DTYPES.get(spec.dtype)
        if dtype is None:
            raise WeightsError(
                f"dtype of {spec.name} must be one of {sorted(TORCH_DTYPES)}, got {spec.dtype}; "
                "start learner and actors with the same release of Nyala"
            )
        count = spec.num_bytes // dtype.itemsize
        shape = torch.Size(spec.shape)
        in_file = 0 <= spec.offset <= spec.offset + spec.num_bytes <= num_bytes
        if not in_file or count == 0 or shape.numel() * dtype.itemsize != spec.num_bytes:
            raise WeightsError(
                f"{spec.name} must be {tuple(shape)} of {spec.dtype} within {num_bytes} bytes, got "
                f"{spec.num_bytes} bytes at offset {spec.offset}, so manifest and weights do not "
                "belong together; start the actor again: it then pulls them again"
            )
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset)
        yield spec.name, flat.view(shape)


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # ACCESS_COPY: torch wants writable memory; nothing written would ever reach the file.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"staged weights must be a readable file, got {path}: {error}; start the actor again: "
            "it then pulls them again"
        ) from error
    if len(mapping) != num_bytes:
        raise WeightsError(
            f"{path} must hold {num_bytes} bytes, got {len(mapping)}; start the actor again: "
            "it then pulls the version again"
        )
    return mapping
