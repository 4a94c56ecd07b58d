"""Reduction of gradients over the ranks: once for an optimizer step where memory allows.

Each backward pass of FSDP reduces the gradients of every unit, which a step of several microbatches
needs only once. Until then each rank holds whole gradients, and keeps the parameters gathered.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .memory_rules import host_share, reduces_once
from .ranks import Ranks


def hold_gradients(module: nn.Module, *, holds: bool) -> None:
    """Decide whether the next backward pass only adds gradients up, or reduces what was added up.

    Args:
        module: Sharded, or not: then there is nothing to reduce.
        holds: Keep gradients and parameters whole: a further backward pass follows.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not holds)
        module.set_reshard_after_backward(not holds)
        _, *units = module.modules()  # the root stays gathered anyway
        for unit in units:
            if isinstance(unit, FSDPModule):
                unit.set_reshard_after_forward(not holds, recurse=False)


def has_room(modules: Iterable[nn.Module], ranks: Ranks) -> bool:
    """Whether every rank has room for whole gradients and parameters; every rank must call it."""
    parameters = [parameter for each in modules for parameter in each.parameters()]
    number = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    is_offloaded = parameters[0].device.type != ranks.device.type
    here = (
        torch.cuda.get_device_properties(ranks.device).total_memory
        if ranks.device.type == "cuda"
        else host_share(ranks.size)  # as if all were on this machine
    )
    # Ranks that decided differently would wait for one another for ever.
    least = -float(ranks.maximum(torch.tensor([-here], dtype=torch.float64)))
    return reduces_once(
        number // ranks.tensor.size,
        trained=trained // ranks.tensor.size,
        ranks=ranks.size // ranks.tensor.size,
        memory=least,
        is_offloaded=is_offloaded,
    )
