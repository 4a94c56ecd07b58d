"""Tensor parallelism: each rank has a part of every large matrix, and runs all tokens with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from configs.errors import SettingsError

from .logits import ALL_OF_IT, VocabularyPart

# --------------------------------------------------------------------------------------------------
# The ranks that divide the matrices of each layer among themselves.


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """This rank among those that have a part of each matrix; all of them run the same tokens."""

    rank: int = 0
    """This rank's place in the group."""
    size: int = 1
    mesh: DeviceMesh | None = None
    """None where the group has one rank."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group for collectives of these ranks."""
        assert self.mesh is not None
        return self.mesh.get_group()

    def part(self, length: int) -> slice:
        """Return this rank's part of a dimension, as DTensor cuts it."""
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
        """Return the tokens whose embeddings and logits this rank has."""
        if self.mesh is None:
            return ALL_OF_IT
        return VocabularyPart(self.part(vocabulary).start, self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Return `x` for different computations on each rank; their gradients are added up."""
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


# --------------------------------------------------------------------------------------------------
# Tensor parallelism: each rank has a part of every large matrix, and runs all tokens with it.
#
# The parts are those of transformers' plan for the model:
#
#     colwise      rows of the weight, hence a part of what the layer gives: heads, or inner width
#     rowwise      columns of the weight; the ranks' outputs are added up
#     replicated_with_grad_allreduce
#                  whole, but used for this rank's heads alone: gradients are added up
#
# Embeddings and output layer are divided by token (`logits.py`). All else is whole, and
# alike on all ranks, as are the states between layers: their gradients are added up once where
# attention begins, and once where the inner layer does.
#
# Parameters are DTensors, which FSDP2 shards further; modules compute with this rank's part.
#
# Source:
#     Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.

COLWISE, ROWWISE, ADDED_UP = "colwise", "rowwise", "replicated_with_grad_allreduce"
TOKENWISE = "tokenwise"
STYLES = {COLWISE, ROWWISE, ADDED_UP, TOKENWISE}


def divide_tensors(model: nn.Module, tensor: TensorGroup) -> None:
    """Divide the parameters of a model, in place; nothing happens where a rank is alone.

    Args:
        model: Whole and alike on every rank, or without memory; not sharded yet.
        tensor: The ranks.

    Raises:
        SettingsError: The model has no plan, or one that divides more than heads and inner width.
    """
    if tensor.mesh is None:
        return
    styles = _styles(model)
    _check(model, styles, tensor)
    divided: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        style = styles.get(name)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in divided:  # tied ones stay tied
                part = tensor.divide(parameter, _placement(style, key))
                divided[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
            module.register_parameter(key, divided[id(parameter)])
        if next(module.parameters(recurse=False), None) is not None:
            module.forward = _forward(module, style, tensor)
    for parent in {name.rpartition(".")[0] for name, s in styles.items() if s == COLWISE}:
        enter = partial(_enter, tensor)
        model.get_submodule(parent).register_forward_pre_hook(enter, with_kwargs=True)


@contextmanager
def local_parameters(module: nn.Module, style: str | None = TOKENWISE) -> Iterator[None]:
    """Replace a module's parameters by this rank's part of each, as plain tensors."""
    whole: dict[str, Any] = dict(module._parameters)
    module._parameters.update(
        {key: _local(part, style) for key, part in whole.items() if isinstance(part, DTensor)}
    )
    try:
        yield
    finally:
        module._parameters.update(whole)


def _local(parameter: DTensor, style: str | None) -> Any:
    gradient = [Partial()] if style == ADDED_UP else parameter.placements
    return parameter.to_local(grad_placements=gradient)


def _placement(style: str | None, key: str) -> Placement:
    if style in {COLWISE, TOKENWISE}:
        return Shard(0)
    return Shard(1) if style == ROWWISE and key == "weight" else Replicate()


def _styles(model: nn.Module) -> dict[str, str]:
    """Map names of modules to the way their parameters are divided; all others stay whole."""
    styles: dict[str, str] = {}
    for prefix, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        by_token = {part.get_input_embeddings(), part.get_output_embeddings()}
        plan: Mapping[str, str] = (part.base_model is part and part.config.base_model_tp_plan) or {}
        for name, module in part.named_modules(prefix=prefix):
            key = re.sub(r"\.\d+\.", ".*.", name.removeprefix(f"{prefix}." if prefix else ""))
            if module in by_token:
                styles[name] = TOKENWISE
            elif key in plan:
                styles[name] = plan[key]
    return styles


def _check(model: nn.Module, styles: Mapping[str, str], tensor: TensorGroup) -> None:
    """Refuse layers that would compute something else with a part of their inputs."""
    reason = ", ".join(sorted({*styles.values()} - STYLES))
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == COLWISE}
    for name, module in model.named_modules():
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if has_parameters and name.rpartition(".")[0] in parents and name not in styles:
            reason = reason or f"{name} is not in it"
    has_layers = any(isinstance(module, PreTrainedModel) for module in model.modules())
    if reason or (has_layers and not parents):
        raise SettingsError(
            "parallel.tensor must be 1 for a model that transformers has no plan of heads and "
            f"inner width for, got {tensor.size} ({reason or 'no plan'}); set parallel.tensor to "
            "1, and parallel.shard instead"
        )


def _forward(module: nn.Module, style: str | None, tensor: TensorGroup) -> Callable[..., Any]:
    forward = module.forward

    def plain(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, style):
            return forward(*args, **kwargs)

    def rowwise(x: Tensor) -> Tensor:
        with local_parameters(module, style):
            bias, module._parameters["bias"] = module._parameters["bias"], None
            added = tensor.add(forward(x))
            return added if bias is None else added + bias

    def embed(token_ids: Tensor) -> Tensor:
        places = token_ids - rows.start
        is_here = (places >= 0) & (places < rows.stop - rows.start)
        with local_parameters(module, style):
            embedded = forward(torch.where(is_here, places, 0))
        return tensor.add(embedded.masked_fill(~is_here[..., None], 0))

    if style == ROWWISE:
        return rowwise
    if not isinstance(module, nn.Embedding):
        return plain
    rows = tensor.part(module.num_embeddings)
    padding = module.padding_idx
    if padding is not None:  # the token whose embedding has no gradient
        module.padding_idx = padding - rows.start if rows.start <= padding < rows.stop else None
    return embed


def _enter(
    tensor: TensorGroup, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take the states, the first argument of attention and of the inner layer."""
    if args:
        return (tensor.enter(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": tensor.enter(kwargs["hidden_states"])}
