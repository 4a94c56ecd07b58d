"""Activations computed again: the same gradients to the bit, for fewer bytes kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.settings import LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.model import activations
from learner.model.activations import Kept, checkpoint_layers, choose
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import layers_of
from tests.learner.support.tiny_policy import tiny_causal_lm


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that operations have made and that are still alive, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and remember its results."""
        given = {storage._cdata for storage in _storages(args)}
        made = func(*args, **kwargs or {})
        for storage in _storages(made):
            if storage._cdata not in given:  # no view
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return made

    @property
    def total(self) -> int:
        """Bytes that are alive now."""
        return sum(size for alive, size in self._storages.values() if not alive.expired())


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


KINDS: tuple[Kept, ...] = ("none", "selective", "full")
TOKENS = 64
# Qwen3-4B with an eighth of its width, heads and inner width: bytes go down alike.
EIGHTH_OF_4B = {
    "hidden_size": 320,
    "intermediate_size": 1216,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 32,
}


def _kept_bytes(kind: Kept, *, offload: bool = False) -> float:
    """Bytes that one more layer keeps per token for its backward pass, in bfloat16."""
    totals: list[int] = []
    for layers in (1, 2):
        config = Qwen3Config(**EIGHTH_OF_4B, num_hidden_layers=layers)
        causal_lm = Qwen3ForCausalLM(config).to(torch.bfloat16)
        checkpoint_layers(layers_of(causal_lm.model), kind, offload=offload)
        with LiveBytes() as live:
            hidden = causal_lm.model(torch.arange(TOKENS)[None] % 32, use_cache=False)
            totals.append(live.total)
            del hidden
    return (totals[1] - totals[0]) / TOKENS


def test_full_keeps_a_twentieth_and_selective_a_half() -> None:
    none, selective, full = (_kept_bytes(kind) for kind in KINDS)

    assert none / full >= 20
    assert none / selective >= 2


class OnHost(NamedTuple):
    """Stands in for a copy in host memory: bytes that torch has nothing to do with."""

    content: np.ndarray[Any, Any]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Copy a tensor."""
        return cls(tensor.detach().view(torch.uint8).numpy().copy(), tensor.dtype)

    def to_device(self, _device: torch.device) -> Tensor:
        """Copy it back."""
        return torch.tensor(self.content).view(self.dtype)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Order in which tensors are copied to a host that is not the device, and back."""
    order: list[str] = []

    def to_host(tensor: Tensor) -> OnHost:
        order.append("there")
        return OnHost.of(tensor)

    def to_device(host: OnHost, device: torch.device) -> Tensor:
        order.append("back")
        return host.to_device(device)

    monkeypatch.setattr(activations, "to_host", to_host)
    monkeypatch.setattr(activations, "to_device", to_device)
    return order


def test_offloaded_inputs_of_layers_leave_nothing_on_the_device(host: list[str]) -> None:
    assert _kept_bytes("full", offload=True) == 0 < _kept_bytes("full")

    assert host == 3 * ["there"], "one of each layer"


@pytest.mark.parametrize("times", [1, 2])
def test_offloaded_inputs_come_back_one_layer_ahead(host: list[str], times: int) -> None:
    plain, offloaded = (
        Policy(tiny_causal_lm(layers=3).double(), temperature=0.7).eval() for _ in range(2)
    )
    checkpoint_layers(layers_of(offloaded.causal_lm.base_model), "full", offload=True)

    def mark(_layer: object, _inputs: object, output: Tensor) -> None:
        output.register_hook(lambda _: host.append("layer"))

    for layer in layers_of(offloaded.causal_lm.base_model):
        layer.register_forward_hook(mark)
    for _ in range(times):
        found, expected = _gradients(offloaded), _gradients(plain)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    backward = ["layer", "back", "back", "layer", "back", "layer"]
    assert host == times * [*3 * ["there"], *backward]


def _gradients(policy: Policy) -> list[Tensor]:
    sequences = Sequences.from_token_ids([range(1, 8), range(4, 15), [3]], prefixes=[None, None, 0])
    scores = policy(sequences, torch.tensor([1, 2, 6, 8, 17, 18]), entropy_gradient=True)
    (scores.logprobs_N.sum() + scores.entropies_N.square().sum()).backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_gradients_are_the_same_to_the_bit(ranks: Ranks, kind: Kept, *, is_sharded: bool) -> None:
    plain, checkpointed = (
        Policy(tiny_causal_lm().double(), temperature=0.7).eval() for _ in range(2)
    )
    names = [name for name, _ in checkpointed.named_parameters()]
    if is_sharded:
        shard(plain, ranks.mesh, dtype=torch.float64)
        shard(checkpointed, ranks.mesh, dtype=torch.float64, activations=kind)
    else:
        checkpoint_layers(layers_of(checkpointed.causal_lm.base_model), kind)

    found, expected = _gradients(checkpointed), _gradients(plain)

    assert [name for name, _ in checkpointed.named_parameters()] == names
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_default_is_full_for_a_large_model_on_a_gpu_alone() -> None:
    with torch.device("meta"):
        large = torch.nn.Linear(2**15, 2**15 + 1)
    small = torch.nn.Linear(2, 2)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    default, offloads = LearnerSettings(), LearnerSettings(offload=("activations",))
    selective = LearnerSettings(activation_checkpointing="selective")
    assert choose(default, large, cuda) == choose(offloads, small, cpu) == "full"
    assert choose(default, large, cpu) == choose(default, small, cuda) == "none"
    assert choose(selective, large, cuda) == "selective"
