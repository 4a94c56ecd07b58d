"""The ranks that divide the matrices of each layer among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from learner.model.logits.vocabulary import ALL_OF_IT, VocabularyPart


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """This rank among those that have a part of each matrix; all of them run the same tokens."""

    rank: int = 0
    """This one's place among them."""
    size: int = 1
    mesh: DeviceMesh | None = None
    """None where there is no other."""

    @property
    def group(self) -> dist.ProcessGroup:
        """For collectives."""
        assert self.mesh is not None
        return self.mesh.get_group()

    def part(self, length: int) -> slice:
        """The part of a dimension that this rank has, as DTensor cuts it."""
        size = -(-length // self.size)
        return slice(min(self.rank * size, length), min((self.rank + 1) * size, length))

    def divide(self, tensor: Tensor, placement: Placement) -> DTensor:
        """Keep this rank's part of a tensor that all have whole."""
        assert self.mesh is not None
        local = tensor.detach()
        if isinstance(placement, Shard):
            part = self.part(tensor.shape[placement.dim])
            local = local.narrow(placement.dim, part.start, part.stop - part.start).clone()
        return DTensor.from_local(
            local,
            self.mesh,
            [placement],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def vocabulary_part(self, vocabulary: int) -> VocabularyPart:
        """The tokens whose embeddings and logits this rank has."""
        if self.mesh is None:
            return ALL_OF_IT
        return VocabularyPart(self.part(vocabulary).start, self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Let each rank compute something else from `x`: its gradients are added up."""
        entered: Tensor = _Enter.apply(x, self.group)
        return entered

    def add(self, x: Tensor) -> Tensor:
        """Add up what the ranks computed; the gradient is that of each part."""
        added: Tensor = _Add.apply(x, self.group)
        return added


UNDIVIDED = TensorGroup()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        gradient = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        added = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(added, group=group)
        return added

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - its name
        return grad_outputs[0], None
