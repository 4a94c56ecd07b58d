"""Norms, rotary embeddings and gated activations of layers by one kernel each, on a card.

The modules of transformers stay, with their parameters and names; their forward methods call the
kernels (`kernels.py`) instead of five to ten operations of torch, each of which reads and writes
all of its tensors. A module that is not known here keeps its own method.

    norm        of the families below, by what they round and whether their weight is an offset;
                in most of them with the sum before it, and the gradient of what goes on from there
    rotary      where both halves of a head are turned by the same angles, and all of it is turned
    activation  SiLU and GELU by tanh of a gate, beside one product or as half of it
    products    of the same states, where weights are copied to a narrower dtype (`one_rank.py`):
                queries, keys and values are one, and gate and what passes it

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
from torch.nn import functional

from .compilers import has_kernels

log = structlog.get_logger()


class Rounding(NamedTuple):
    """How a family's norm gets from the normed states to its output."""

    offset: float
    """Number that is added to the weight."""
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
"""Families by the beginning of the names of transformers' classes."""
SILU, GELU = {"SiLU", "SiLUActivation"}, {"GELUTanh", "PytorchGELUTanh"}
ORDINARY = {f"{family}DecoderLayer" for family in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma")}
"""Layers that norm states, attend, add, norm, and add the activation's product."""
ROTARY = "apply_rotary_pos_emb"
"""The function that the modules of transformers call by this name."""


@cache
def _kernels() -> Any:
    return importlib.import_module("learner.model.kernels")


def fuse_layers(modules: Iterable[nn.Module], device_type: str) -> None:
    """Make modules compute by kernels where there are some; call it before they are sharded."""
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


def _norm_forward(module: Any, family: Rounding) -> Callable[..., Any] | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return None if eps is None else partial(_run_norm, module, float(eps), family)


def _run_norm(module: Any, eps: float, family: Rounding, hidden_states: Tensor, *added: Any) -> Any:
    """Norm states; where something is added to them, or None, return the sum too."""
    how = *family, bool(added), *added
    return _kernels().Norm.apply(hidden_states, module.weight, eps, *how)


def _layer_forward(module: Any, _family: Rounding) -> Callable[..., Any] | None:
    return partial(_run_layer, module) if type(module).__name__ in ORDINARY else None


def _run_layer(module: Any, hidden_states: Tensor, *places: Any, **how: Any) -> Tensor:
    """Run a layer whose second norm adds the output of attention to the kept states."""
    normed, kept = module.input_layernorm(hidden_states, None)
    attended, _ = module.self_attn(normed, *places, **how)
    normed, kept = module.post_attention_layernorm(kept, attended)
    states: Tensor = kept + module.mlp(normed)
    return states


def _mlp_forward(module: Any, _family: Rounding) -> Callable[..., Any] | None:
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    name = type(activation).__name__
    if name not in SILU | GELU:
        return None
    is_joint = hasattr(module, "gate_up_proj")
    return partial(_run_joint_mlp if is_joint else _run_mlp, module, name in SILU)


def _run_mlp(module: Any, is_silu: bool, x: Tensor) -> Any:
    gate = module.gate_proj(x)
    if gate.shape[-1] > module.gate_proj.out_features:
        return module.down_proj(_kernels().JoinedGate.apply(gate, is_silu))
    return module.down_proj(_kernels().Gate.apply(gate, module.up_proj(x), is_silu))


def _run_joint_mlp(module: Any, is_silu: bool, hidden_states: Tensor) -> Any:
    return module.down_proj(
        _kernels().JoinedGate.apply(module.gate_up_proj(hidden_states), is_silu)
    )


def _attention_forward(module: Any, _family: Rounding) -> Callable[..., Any] | None:
    """Copy the forward method, with `_rotate` in the place of the function that it calls."""
    method = type(module).forward
    plain = method.__globals__.get(ROTARY)
    if plain is None or ROTARY not in method.__code__.co_names:
        return None
    names = method.__globals__ | {ROTARY: partial(_rotate, plain)}
    copied = types.FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__
    )
    copied.__kwdefaults__ = method.__kwdefaults__
    return types.MethodType(copied, module)


def _rotate(plain: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    if cos.shape[-1] != q.shape[-1] or not len(q) == len(cos) == 1:
        return plain(q, k, cos, sin)
    return _kernels().Rotate.apply(q, k, cos[0], sin[0])


MAKERS = {
    "RMSNorm": _norm_forward,
    "MLP": _mlp_forward,
    "Attention": _attention_forward,
    "DecoderLayer": _layer_forward,
}


# --------------------------------------------------------------------------------------------------
# Products of the same states as one, while the first layer's weight has all rows of the others too.

Joined = list[nn.Linear]


def join_products(modules: Iterable[nn.Module]) -> list[Joined]:
    """Join the products of linear layers with the same input; list the layers of each product.

    Layers with adapters keep products of their own.
    """
    products = []
    for module in modules:
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            layers: Any = [getattr(module, name, None) for name in names]
            if any(type(layer) is not nn.Linear for layer in layers):
                continue  # those with adapters among them
            if names[0] == "q_proj":
                _share_product(layers, is_kept_whole=hasattr(module, "q_norm"))
            elif getattr(module.forward, "func", None) is not _run_mlp:
                continue
            products.append(layers)
    return products


def _share_product(layers: Joined, *, is_kept_whole: bool) -> None:
    """Give each layer its part of the product that the first one makes.

    Args:
        layers: Queries, keys and values.
        is_kept_whole: Whether the backward pass keeps the whole product anyway, as for norms of
            queries and keys. Else the values are copied: a kept view would hold the whole product.
    """
    first, *others = layers
    parts: list[Tensor] = []

    def begin(states: Tensor) -> Tensor:
        product = functional.linear(states, first.weight, first.bias)
        sizes = [layer.out_features for layer in layers]
        is_whole = product.shape[-1] == sum(sizes)
        part, *parts[:] = product.split(sizes, -1) if is_whole else [product]
        return part

    def go_on(layer: nn.Linear, states: Tensor) -> Tensor:
        if not parts:
            return functional.linear(states, layer.weight, layer.bias)
        part = parts.pop(0)
        return part if parts or is_kept_whole else part.contiguous()

    first.forward = begin  # type: ignore[method-assign,assignment]
    for layer in others:
        layer.forward = partial(go_on, layer)  # type: ignore[method-assign]
