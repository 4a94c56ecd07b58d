"""Tensors of a checkpoint: names, copies in host memory, files, random number generators."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.errors import CheckpointError
from learner.model.policy import Policy
from learner.model.saved_model import Box, TensorFiles, box_of, local_of
from learner.training.adamw_8bit import zeros_for
from learner.training.critic import Critic
from learner.training.optimizer import ScheduledOptimizer
from learner.weights.layout import unwrapped_name

from .manifest import read_manifest

# --------------------------------------------------------------------------------------------------
# Tensors of a checkpoint on disk: each rank writes its pieces, and reads any box of the whole.
#
#   tensors-<rank>.safetensors    the pieces of one rank; a piece that is not the whole tensor has
#                                 [shape of the whole, offset in it] under its name in the metadata
#
# Whoever loads asks for boxes: with as many ranks as before each is one piece, with others it is
# put together from several. Files are written by hand, because a digest is taken of the bytes on
# their way; `safetensors` reads them.

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
class TensorShard:
    """The part of a tensor that a rank holds."""

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


def encode_shards(pieces: Mapping[str, TensorShard]) -> Iterator[bytes | memoryview]:
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
        """Open the files that the manifest lists, and read the names of their tensors.

        Raises:
            CheckpointError: A file holds no tensors.
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
                raise CheckpointError(
                    f"{path} must hold tensors, got other content ({error}); restore the "
                    "checkpoint from a copy, or use another one"
                ) from error
            self._files.add(file, boxes)
        self.shapes = self._files.shapes
        self.dtypes = {name: TORCH_DTYPES[dtype] for name, dtype in self._files.dtypes.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's pieces of the named tensors into them.

        Raises:
            CheckpointError: The files do not hold all of them, or another shape.
        """
        for name, tensor in tensors.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{self._folder} must hold {name} of shape {tuple(tensor.shape)}, got "
                    f"{self.shapes.get(name, 'none')}; it is of another model: restore run.model, "
                    "or use another checkpoint"
                )
            self._read_box(name, local_of(tensor), box_of(tensor).offset)

    def read_whole(self, name: str) -> Tensor:
        """Read one tensor whole, in the dtype that it has in the files.

        Raises:
            CheckpointError: A part of it is missing.
        """
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self._read_box(name, whole, (0,) * whole.ndim)
        return whole

    def _read_box(self, name: str, local: Tensor, offset: tuple[int, ...]) -> None:
        filled = self._files.read(name, local, offset)
        if filled != local.numel():
            raise CheckpointError(
                f"{self._folder} must hold all {local.numel()} elements of {name} from offset "
                f"{offset} on, got {filled}; a rank's file is missing: restore the checkpoint from "
                "a copy, or use another one"
            )


# --------------------------------------------------------------------------------------------------
# The tensors of a learner by name: parameters, buffers, moments; a critic's beside the policy's.
#
#     model.<parameter>, optimizer.<parameter>.<moment>, critic..., critic_optimizer...
#
# A tied parameter has one name. Names do not depend on how modules are wrapped.


class CheckpointedModel(NamedTuple):
    """A model with its optimizer, and the prefixes of their names."""

    name: str
    optimizer_name: str
    model: nn.Module
    optimizer: ScheduledOptimizer


def parts_of(
    policy: Policy, optimizer: ScheduledOptimizer, critic: Critic | None
) -> list[CheckpointedModel]:
    """List the parts of the state that have tensors in a checkpoint."""
    parts = [CheckpointedModel("model", "optimizer", policy, optimizer)]
    if critic is not None:
        parts.append(
            CheckpointedModel("critic", "critic_optimizer", critic.model, critic.optimizer)
        )
    return parts


def model_tensors(part: CheckpointedModel) -> dict[str, Tensor]:
    """Return parameters and buffers by name; where some are frozen, only trained parameters."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    is_frozen = not all(parameter.requires_grad for parameter in part.model.parameters())
    for name, tensor in part.model.state_dict(keep_vars=True).items():
        if is_frozen and not tensor.requires_grad:
            continue
        if id(tensor) not in seen:  # tied ones come again under another name
            seen.add(id(tensor))
            named[f"{part.name}.{unwrapped_name(name)}"] = tensor
    return named


def moments(part: CheckpointedModel) -> dict[str, Tensor]:
    """Return the optimizer's moments by name."""
    return {
        f"{prefix}.{key}": moment
        for prefix, parameter in _optimized(part)
        for key, moment in part.optimizer.moments_of(parameter).items()
    }


def make_moments(
    part: CheckpointedModel,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors for what was saved, and name them.

    Raises:
        CheckpointError: The checkpoint has the moments of another optimizer.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        prefix, _, key = name.rpartition(".")
        keys[prefix].append(key)
    part.optimizer.forget()
    tensors: dict[str, Tensor] = {}
    for prefix, parameter in _optimized(part):  # in the order in which steps make them
        expected = part.optimizer.names_of_moments(parameter)
        if keys[prefix] and set(keys[prefix]) != expected:
            raise CheckpointError(
                f"the checkpoint must have the moments {sorted(expected)} of {prefix}, got "
                f"{sorted(keys[prefix])}; restore the learner.optimizer that wrote it"
            )
        moments = part.optimizer.moments_of(parameter)
        for key in keys[prefix]:
            name = f"{prefix}.{key}"
            moments[key] = tensors[name] = zeros_for(parameter, shapes[name], dtypes[name])
    return tensors


def _optimized(part: CheckpointedModel) -> Iterator[tuple[str, nn.Parameter]]:
    for name, tensor in model_tensors(part).items():
        if isinstance(tensor, nn.Parameter):
            yield part.optimizer_name + name.removeprefix(part.name), tensor


class HostCopies:
    """Copies of this rank's pieces in host memory, in buffers that the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._boxes: dict[str, Box] = {}

    def find(self, parts: list[CheckpointedModel], *, is_first: bool) -> dict[str, Tensor]:
        """Find the tensors of which this rank writes its pieces, without copying them.

        Args:
            parts: Models and optimizers.
            is_first: Whether this is rank 0, which writes what is equal on all ranks.
        """
        tensors: dict[str, Tensor] = {}
        for part in parts:
            for name, tensor in (model_tensors(part) | moments(part)).items():
                if not is_written_here(tensor, is_first=is_first) or not local_of(tensor).numel():
                    continue
                tensors[name] = local_of(tensor)
                if name not in self._boxes:
                    self._boxes[name] = box_of(tensor)
        return tensors

    def copies_of(self, tensors: Mapping[str, Tensor], *, anew: bool) -> dict[str, Tensor]:
        """Return copies of what `find` returned: made `anew`, or those of the last time.

        New copies replace those of the last time, in the same memory.
        """
        return self._copy(tensors) if anew else {name: self._buffers[name] for name in tensors}

    def on_host(
        self, tensors: Mapping[str, Tensor], *, copied: bool = False
    ) -> dict[str, TensorShard]:
        """Return the pieces of the tensors that `find` returned, in host memory.

        Args:
            tensors: Tensors by name, as `find` returned them.
            copied: Copy all tensors, so that training may go on; otherwise only those on a GPU.
        """
        if copied or any(tensor.is_cuda for tensor in tensors.values()):
            tensors = self._copy(tensors)
        return {name: TensorShard(local, self._boxes[name]) for name, local in tensors.items()}

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            self._buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in tensors}


# --------------------------------------------------------------------------------------------------
# States of a rank's random number generators: that of the CPU, then that of its GPU.


def random_state(device: torch.device) -> bytes:
    """Encode the states of torch's random number generators: the CPU's, then that of a GPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states).numpy().tobytes()


def restore_random_state(encoded: bytes, device: torch.device) -> None:
    """Restore states from `random_state`; only the CPU's where the device is of another kind."""
    both = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    size = torch.get_rng_state().numel()
    torch.set_rng_state(both[:size])
    if device.type == "cuda" and len(both) > size:
        torch.cuda.set_rng_state(both[size:], device)
