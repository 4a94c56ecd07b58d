"""The tensors of a learner by name: parameters, buffers, moments; a critic's beside the policy's.

    model.<parameter>, optimizer.<parameter>.<moment>, critic..., critic_optimizer...

A tied parameter has one name. Names do not depend on how modules are wrapped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configs.errors import CheckpointError
from learner.model.policy import Policy
from learner.model.tensor_files import Box, box_of, local_of
from learner.training.adamw_8bit import zeros_for
from learner.training.critic import Critic
from learner.training.optimizer import ScheduledOptimizer
from learner.weights.wire.layout import unwrapped_name

from .shards import Piece, is_written_here


class Part(NamedTuple):
    """A model with its optimizer, and the prefixes of their names."""

    name: str
    optimizer_name: str
    model: nn.Module
    optimizer: ScheduledOptimizer


def parts_of(policy: Policy, optimizer: ScheduledOptimizer, critic: Critic | None) -> list[Part]:
    """List what has tensors in a checkpoint."""
    parts = [Part("model", "optimizer", policy, optimizer)]
    if critic is not None:
        parts.append(Part("critic", "critic_optimizer", critic.model, critic.optimizer))
    return parts


def model_tensors(part: Part) -> dict[str, Tensor]:
    """Name parameters and buffers; where some are frozen, the trained parameters alone."""
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


def moments(part: Part) -> dict[str, Tensor]:
    """Name the optimizer's state."""
    return {
        f"{prefix}.{key}": moment
        for prefix, parameter in _optimized(part)
        for key, moment in part.optimizer.moments_of(parameter).items()
    }


def make_moments(
    part: Part, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors for what was saved, and name them.

    Raises:
        CheckpointError: They are another optimizer's.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        prefix, _, key = name.rpartition(".")
        keys[prefix].append(key)
    part.optimizer.forget()
    made: dict[str, Tensor] = {}
    for prefix, parameter in _optimized(part):  # in the order in which steps would make them
        expected = part.optimizer.names_of_moments(parameter)
        if keys[prefix] and set(keys[prefix]) != expected:
            raise CheckpointError(
                f"the checkpoint must have the moments {sorted(expected)} of {prefix}, got "
                f"{sorted(keys[prefix])}; set learner.optimizer as it was when it was written"
            )
        moments = part.optimizer.moments_of(parameter)
        for key in keys[prefix]:
            name = f"{prefix}.{key}"
            moments[key] = made[name] = zeros_for(parameter, shapes[name], dtypes[name])
    return made


def _optimized(part: Part) -> Iterator[tuple[str, nn.Parameter]]:
    for name, tensor in model_tensors(part).items():
        if isinstance(tensor, nn.Parameter):
            yield part.optimizer_name + name.removeprefix(part.name), tensor


class HostCopies:
    """Copies of this rank's pieces in host memory, in buffers that the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._boxes: dict[str, Box] = {}

    def pieces(self, parts: list[Part], *, is_first: bool, copied: bool) -> dict[str, Piece]:
        """Collect the pieces that this rank writes.

        Args:
            parts: Models and optimizers.
            is_first: What all ranks have alike, rank 0 writes.
            copied: Copy them: training may then go on. Otherwise those on a GPU are copied alone.
        """
        found: dict[str, Tensor] = {}
        for part in parts:
            for name, tensor in (model_tensors(part) | moments(part)).items():
                if not is_written_here(tensor, is_first=is_first) or not local_of(tensor).numel():
                    continue
                found[name] = local_of(tensor)
                if name not in self._boxes:
                    self._boxes[name] = box_of(tensor)
        if copied or any(tensor.is_cuda for tensor in found.values()):
            found = self._copy(found)
        return {name: Piece(local, self._boxes[name]) for name, local in found.items()}

    def _copy(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in found.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            self._buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in found.values()):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in found}
