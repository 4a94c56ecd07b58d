"""Norms, rotary embeddings and gated activations of layers by one kernel each, on a card.

The modules of transformers stay, with their parameters and names; their forward methods call the
kernels (`kernels.py`) instead of five to ten operations of torch, each of which reads and writes
all of its tensors. Whichever is not known here keeps its own method.

    norm        of the families below, by what they round and whether their weight is an offset
    rotary      where both halves of a head are turned by the same angles, and all of it is turned
    activation  SiLU and GELU by tanh of a gate, beside one product or as half of it

Layers that are compiled are left to the compiler, and those on a CPU to torch.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import structlog
from torch import Tensor, nn

from .compilers import has_kernels

log = structlog.get_logger()


class Rounding(NamedTuple):
    """How a family's norm comes from the normed states to its output."""

    offset: float
    """What is added to the weight."""
    rounds_first: bool
    """Normed states are rounded before they are multiplied with the weight."""


AS_LLAMA, AS_GEMMA, AS_OLMO = Rounding(0.0, True), Rounding(1.0, False), Rounding(0.0, False)
FAMILIES = {
    "Llama": AS_LLAMA,
    "Qwen2": AS_LLAMA,
    "Qwen3": AS_LLAMA,
    "Mistral": AS_LLAMA,
    "Phi3": AS_LLAMA,
    "Granite": AS_LLAMA,
    "Gemma": AS_GEMMA,
    "Gemma2": AS_GEMMA,
    "Gemma3": AS_GEMMA,
    "Olmo2": AS_OLMO,
}
"""By the beginning of the names of transformers' classes."""
SILU, GELU = {"SiLU", "SiLUActivation"}, {"GELUTanh", "PytorchGELUTanh"}
ROTARY = "apply_rotary_pos_emb"
"""The function that the modules of transformers call by this name."""


@cache
def _kernels() -> Any:
    return importlib.import_module("learner.model.kernels")


def fuse_layers(modules: Iterable[nn.Module], device_type: str) -> None:
    """Let modules compute by kernels where there are some; before they are sharded."""
    if not has_kernels(device_type):
        return
    fused, plain = set[str](), set[str]()
    for module in modules:
        name = type(module).__name__
        part = next((p for p in MAKERS if name.endswith(p)), None)
        if part is None or not type(module).__module__.startswith("transformers.models."):
            continue
        family = FAMILIES.get(name.removesuffix(part))
        forward = None if family is None else MAKERS[part](module, family)
        (plain if forward is None else fused).add(name)
        if forward is not None:
            module.forward = forward
    log.info("layers computed by fused kernels", fused=sorted(fused), plain=sorted(plain))


# --------------------------------------------------------------------------------------------------
# The forward methods; None where a module computes something else.


def _norm(module: Any, family: Rounding) -> Callable[..., Any] | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return None if eps is None else partial(_normed, module, float(eps), family)


def _normed(module: Any, eps: float, family: Rounding, hidden_states: Tensor) -> Tensor:
    normed: Tensor = _kernels().Norm.apply(hidden_states, module.weight, eps, *family)
    return normed


def _inner(module: Any, _family: Rounding) -> Callable[..., Any] | None:
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    name = type(activation).__name__
    if name not in SILU | GELU:
        return None
    is_joint = hasattr(module, "gate_up_proj")
    return partial(_joint if is_joint else _gated, module, name in SILU)


def _gated(module: Any, is_silu: bool, x: Tensor) -> Any:
    return module.down_proj(_kernels().Gate.apply(module.gate_proj(x), module.up_proj(x), is_silu))


def _joint(module: Any, is_silu: bool, hidden_states: Tensor) -> Any:
    gate, up = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return module.down_proj(_kernels().Gate.apply(gate, up, is_silu))


def _attention(module: Any, _family: Rounding) -> Callable[..., Any] | None:
    """Copy the method, with another function in the place of the one that it calls."""
    own = type(module).forward
    plain = own.__globals__.get(ROTARY)
    if plain is None or ROTARY not in own.__code__.co_names:
        return None
    names = own.__globals__ | {ROTARY: partial(_rotate, plain)}
    copied = types.FunctionType(
        own.__code__, names, own.__name__, own.__defaults__, own.__closure__
    )
    copied.__kwdefaults__ = own.__kwdefaults__
    return types.MethodType(copied, module)


def _rotate(plain: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    if cos.shape[-1] != q.shape[-1] or not len(q) == len(cos) == 1:
        return plain(q, k, cos, sin)
    return _kernels().Rotate.apply(q, k, cos[0], sin[0])


MAKERS = {"RMSNorm": _norm, "MLP": _inner, "Attention": _attention}
