"""The target policy: a Hugging Face causal language model, sharded with FSDP2, that scores tokens.

Owns sharding; `saved_model.py` reads the weights, `output_layer.py` turns hidden states into
log-probs. Losses, batches and the publication of weights lie elsewhere.

Sequences come packed, one after another without pads; `attention.py` keeps them apart.

Shapes: T tokens of all sequences of a microbatch, N of these that are scored, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedModel

from learner.algorithm.microbatch import Sequences
from learner.weights.layout import count_weights

from .activations import Kept, checkpoint_layers
from .attention import PACKED, attend_over_ranks, pack_attention, run_trunk, take
from .compilers import check_compiler, has_kernels
from .cpu import choose_products
from .fused import fuse_layers
from .logits import ALL_OF_IT
from .lora import Adapter
from .memory_rules import host_share, reduces_once
from .one_rank import narrow_layers, narrow_rest
from .output_layer import draw_tokens, output_layer, score_tokens, softmax_of
from .ranks import Ranks
from .saved_model import layers_of
from .sequence_parallel import ALONE, SequenceSplit
from .tensor_parallel import UNDIVIDED, TensorGroup, divide_tensors, local_parameters

# --------------------------------------------------------------------------------------------------
# Layers compiled by `torch.compile`, for any number of tokens at once.
#
# Attention is not compiled: it cuts its tokens by the lengths of the sequences, and each
# combination of lengths would be compiled anew. Equal layers share compiled code. Gathering by
# FSDP2 and activation checkpointing lie outside.


def compile_layers(layers: Iterable[nn.Module], device_type: str) -> None:
    """Compile each layer at its first run; call this before layers are checkpointed and sharded.

    Raises:
        SettingsError: There is nothing to compile with.
    """
    check_compiler(device_type)
    AttentionInterface.register(PACKED, torch.compiler.disable(attend_over_ranks))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


# --------------------------------------------------------------------------------------------------
# Reduction of gradients over the ranks: once for an optimizer step where memory allows.
#
# Each backward pass of FSDP reduces the gradients of every unit, which a step of several
# microbatches needs only once. Until then each rank holds whole gradients, and keeps the
# parameters gathered.


def hold_gradients(module: nn.Module, *, keeps_whole: bool) -> None:
    """Choose whether the next backward pass adds gradients up only, or reduces the sums too.

    Args:
        module: A sharded module; on any other this does nothing.
        keeps_whole: Keep gradients and parameters whole, as a further backward pass follows.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not keeps_whole)
        module.set_reshard_after_backward(not keeps_whole)
        _, *units = module.modules()  # the root stays gathered anyway
        for unit in units:
            if isinstance(unit, FSDPModule):
                unit.set_reshard_after_forward(not keeps_whole, recurse=False)


def has_room(modules: Collection[nn.Module], ranks: Ranks) -> bool:
    """Whether to reduce gradients once for an optimizer step; every rank must call it.

    That is so where every rank has room for whole gradients and parameters, and where there is
    something to save: several ranks, or offloaded parameters.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    number = sum(count_weights(module) for module in modules)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    is_offloaded = any(p.device.type != ranks.device.type for p in parameters)
    here = (
        torch.cuda.get_device_properties(ranks.device).total_memory
        if ranks.device.type == "cuda"
        else host_share(ranks.size)  # as if all were on this machine
    )
    # Ranks with different decisions would wait for one another for ever.
    least = -float(ranks.maximum(torch.tensor([-here], dtype=torch.float64)))
    return reduces_once(
        number // ranks.tensor.size,
        trained=trained // ranks.tensor.size,
        ranks=ranks.size // ranks.tensor.size,
        memory=least,
        is_offloaded=is_offloaded,
    )


# --------------------------------------------------------------------------------------------------
# The target policy: a Hugging Face causal language model, sharded with FSDP2, that scores tokens.

LossOfPlaces = Callable[[Tensor | slice, Tensor, Tensor], Tensor]
"""Places of some of the N tokens, their log-probs and entropies -> their part of a loss."""


class TokenScores(NamedTuple):
    """Log-probs, entropies and hidden states of the scored tokens."""

    logprobs_N: Tensor
    """log pi of each scored token at the sampling temperature, nats. Shape [N], float32."""
    entropies_N: Tensor
    """Entropy of the distribution that each token was drawn from, nats. Shape [N], float32."""
    states_MD: Tensor
    """Last hidden states from which this rank's M of the tokens are predicted. Shape [M, D]."""
    loss: Tensor | None = None
    """This rank's part of the loss, where `loss_of` was passed. Then only the loss and the states
    have gradients."""
    drawn_N: Tensor | None = None
    """Tokens drawn in place of the scored ones, where numbers were given. Shape [N], int64."""


class Policy(nn.Module):
    """Scores sampled tokens with a causal language model.

    The output layer runs inside `forward`, where FSDP2 has gathered its weights.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        temperature: float,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        """Wrap a causal language model.

        Args:
            causal_lm: Model that scores tokens; its attention is packed from now on.
            temperature: Temperature at which training episodes are sampled.
            head_dtype: Data type of the output layer's products; None = that of its weight.
        """
        super().__init__()
        pack_attention(causal_lm)
        self.sequence_group = ALONE
        """Ranks that share the tokens of a microbatch."""
        self.adapter: Adapter | None = None
        """Identity of adapters beside a frozen model; None = the whole model is trained."""
        self.device = torch.device("cpu")
        """Device that computes; offloaded parameters lie elsewhere."""
        self.causal_lm = causal_lm
        self.softmax = softmax_of(causal_lm, temperature=temperature, dtype=head_dtype)
        self.vocabulary = int(causal_lm.config.vocab_size)
        self.vocabulary_part = ALL_OF_IT
        """Tokens whose logits this rank computes."""

    def forward(
        self,
        sequences: Sequences,
        indices_N: Tensor,
        *,
        entropy_gradient: bool = False,
        temperature: float | None = None,
        loss_of: LossOfPlaces | None = None,
        numbers: Sequence[float] | None = None,
    ) -> TokenScores:
        """Score the tokens at `indices_N`, each of which has one before it.

        Args:
            sequences: The packed sequences.
            indices_N: Tokens to score, of all T. Shape [N], int64.
            entropy_gradient: Let gradients flow through the entropies too.
            temperature: Temperature of the softmax; None = that of training episodes.
            loss_of: A loss that is a sum over tokens, to be differentiated on the way.
            numbers: Draw a token in place of each scored one, by a number between 0 and 1. FSDP2
                would round a tensor to the dtype that it computes in.

        Returns:
            Log-probs, entropies and states of the scored tokens.
        """
        cut = SequenceSplit(self.sequence_group, sequences, indices_N)
        layer = output_layer(self.causal_lm)
        softmax = self.softmax
        if temperature is not None:
            softmax = replace(softmax, temperature=temperature)
        states_MD = states_before(self.causal_lm.base_model, sequences, cut)
        drawn_N = None
        with local_parameters(layer):
            scored = score_tokens(
                layer,
                states_MD,
                cut.own_scores(sequences.token_ids_T.index_select(0, indices_N)),
                softmax,
                part=self.vocabulary_part,
                entropy_gradient=entropy_gradient,
                loss_of=loss_of and (lambda rows, *scores: loss_of(cut.places(rows), *scores)),
            )
            if numbers is not None:
                own_M = cut.own_scores(torch.tensor(numbers, device=states_MD.device))
                drawn_M = draw_tokens(layer, states_MD, own_M, softmax, part=self.vocabulary_part)
                drawn_N = cut.gather(drawn_M)
        scores = cut.gather(scored.logprobs_N), cut.gather(scored.entropies_N)
        return TokenScores(*scores, states_MD, scored.loss, drawn_N)


def states_before(trunk: nn.Module, sequences: Sequences, cut: SequenceSplit) -> Tensor:
    """Run a model without its output layer; the state before a token predicts it. Shape [M, D]."""
    return take(run_trunk(trunk, sequences, cut), cut.states_M)


def shard(
    policy: Policy,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    activations: Kept = "none",
    offload: Container[str] = (),
    compiled: bool = False,
    tensor: TensorGroup = UNDIVIDED,
) -> Policy:
    """Shard a policy over the ranks of `mesh` with FSDP2: each layer a unit, the rest one more.

    One rank that offloads no weights does without FSDP2 where it has weights to cast and layers are
    not compiled (`narrows`), and on a CPU where it has none to cast (`stays_whole`). Its parameters
    stay plain tensors, with the same results, and each layer makes copies in `dtype` of those in
    another.

    Args:
        policy: The whole policy, equal on every rank; weights may still be without memory.
        mesh: All ranks; its device is where parameters move. Of two dimensions, the first has
            copies of what the second shards.
        dtype: Data type of forward and backward passes. Gradients are reduced in float32 at least.
        activations: What each layer keeps for its backward pass.
        offload: What lies in host memory (`learner.offload`).
        compiled: Compile layers.
        tensor: Ranks that divide matrices; those of `mesh` have the same part.

    Raises:
        SettingsError: There is nothing to compile with, or the model's matrices cannot be divided.
    """
    layers = layers_of(policy.causal_lm.base_model)
    if compiled:
        compile_layers(layers, mesh.device_type)
    else:  # the compiler chooses by itself
        choose_products(policy.causal_lm.base_model.modules(), mesh.device_type)
        fuse_layers(policy.causal_lm.base_model.modules(), mesh.device_type)
    divide_tensors(policy, tensor)
    policy.vocabulary_part = tensor.vocabulary_part(policy.vocabulary)
    is_plain = not compiled and "parameters" not in offload and narrows(policy, mesh, dtype)
    if is_plain:
        narrow_layers(layers, dtype, joins=has_kernels(mesh.device_type))
    checkpoint_layers(layers, activations, offload="activations" in offload)
    if is_plain:
        _move(policy, mesh.device_type)
        narrow_rest(policy, layers, dtype)
    else:
        shard_units(policy, layers, mesh, dtype=dtype, offload="parameters" in offload)
    policy.device = torch.device(mesh.device_type)
    return policy


def _move(module: nn.Module, device: str) -> None:
    """Move tensors that have memory to a device, as FSDP2 does."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def shard_units(
    module: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    offload: bool = False,
) -> None:
    """Shard each of `layers` as a unit of its own, and the rest of `module` as one more.

    A module that one rank can compute with as it is stays whole.
    """
    if not offload and stays_whole(module, mesh, dtype):
        return
    is_pinned = mesh.device_type != "cpu"
    where = CPUOffloadPolicy(pin_memory=is_pinned) if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=None if all(p.dtype == dtype for p in module.parameters()) else dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=dtype != torch.float32,  # as `narrow_layers`
    )
    for unit in (*layers, module):  # a unit within another is sharded before it
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=where)
        sharded = cast("FSDPModule", unit)
        # Losses are already divided by counts over all ranks: sum gradients, do not average them.
        # Forced, because gloo has no scaled sum, not even with a factor of 1.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def stays_whole(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> bool:
    """Whether there is nothing to gather, to cast or to move: FSDP2 would only take its time."""
    return (
        mesh.size() == 1
        and mesh.device_type == "cpu"
        and all(p.dtype == dtype and not isinstance(p, DTensor) for p in module.parameters())
    )


def narrows(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> bool:
    """Whether one rank has nothing to gather, but something to cast; on any device."""
    parameters = [*module.parameters()]
    is_whole = mesh.size() == 1 and not any(isinstance(p, DTensor) for p in parameters)
    return is_whole and any(p.dtype != dtype for p in parameters)


def freeze(policy: Policy) -> Policy:
    """Exclude all parameters of a policy from training, in place: it becomes the reference."""
    return policy.eval().requires_grad_(requires_grad=False)


def release(module: nn.Module) -> None:
    """Reshard gathered parameters after a forward pass that no backward pass follows.

    Otherwise the root would stay gathered, and the next optimizer step would change its shards
    only. Does nothing to a module that is not sharded.
    """
    if isinstance(module, FSDPModule):
        module.reshard()


def probe_logprobs(policy: Policy, token_ids: tuple[int, ...]) -> list[float]:
    """Score tokens 1.. of one sequence at temperature 1, nats; every rank must call it."""
    return probe_scores(policy, token_ids, tuple(0.5 for _ in token_ids[1:]))[0]


@torch.no_grad()
def probe_scores(
    policy: Policy, token_ids: tuple[int, ...], numbers: tuple[float, ...]
) -> tuple[list[float], list[int]]:
    """Score tokens 1.. of one sequence and draw each again, at temperature 1; on every rank.

    Args:
        policy: Sharded or whole.
        token_ids: N + 1 of them.
        numbers: N numbers between 0 and 1.

    Returns:
        Log-probs, nats, and drawn tokens.
    """
    scores = policy(
        Sequences.from_token_ids([token_ids]).to(policy.device),
        torch.arange(1, len(token_ids), device=policy.device),
        temperature=1.0,
        numbers=numbers,
    )
    assert scores.drawn_N is not None
    answer = scores.logprobs_N.tolist(), scores.drawn_N.tolist()
    release(policy)
    return answer


def rounded_logprobs(
    policy: Policy, token_ids: tuple[int, ...], seed: int = 0, *, dtype: torch.dtype
) -> list[float]:
    """Score as `probe_logprobs` does, with the output of each module rounded again, at random.

    Two right implementations differ as two such passes do: each rounds after every operation, and
    all later layers pass it on.

    Args:
        policy: Sharded or whole.
        token_ids: At least 2.
        seed: Seed of the random rounding.
        dtype: Data type that engines compute in. A policy in a finer one, as every one is on a CPU,
            rounds to it here; logits too, unless they have a dtype of their own.

    Values within a kernel are not rounded, such as the activation of a fused inner layer.
    """
    random = torch.Generator(policy.device).manual_seed(seed)

    def round_once(_module: nn.Module, _inputs: object, output: object) -> object:
        states, *others = output if isinstance(output, tuple) else (output,)
        if not (isinstance(states, Tensor) and states.is_floating_point()):
            return output
        noise = torch.rand(states.shape, generator=random, device=states.device)
        unit = max(torch.finfo(kind).eps for kind in (states.dtype, dtype)) / 2
        rounded = (states.float() * (1 + unit * (2 * noise - 1))).to(states.dtype)
        return (rounded, *others) if isinstance(output, tuple) else rounded

    trunk, softmax = policy.causal_lm.base_model, policy.softmax
    handles = [
        module.register_forward_hook(round_once)
        for module in trunk.modules()
        if module is not trunk
    ]
    if dtype != torch.float32:
        policy.softmax = replace(softmax, dtype=softmax.dtype or dtype)
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled layer would keep its hooks
            return probe_logprobs(policy, token_ids)
    finally:
        policy.softmax = softmax
        for handle in handles:
            handle.remove()
