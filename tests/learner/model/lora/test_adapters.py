"""Adapters: what they compute, publish and train, against weights with the product added."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from configs.errors import SettingsError
from configs.settings import LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.model.lora import AdaptedLinear, adapt, reset_adapters
from learner.model.policy import Policy, probe_logprobs, rounded_logprobs
from learner.model.ranks import Ranks
from learner.training.step import train_batch
from tests.learner.support.adapted_policy import (
    SETTINGS,
    adapted_policy,
    fill_adapters,
    published_bytes,
)
from tests.learner.support.exact_gradients import EXACT, PRECISIONS, make_model, packed, train
from tests.learner.support.exact_gradients import SETTINGS as LOSS
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.tiny_policy import parameters_of, tiny_causal_lm, tiny_policy

PROBE = (3, 9, 4, 4, 17)
EPISODES = random_group_episodes(4, 3, seed=1)


def _adapted(family: str, dtype: torch.dtype) -> Any:
    model = make_model(family, dtype)
    adapt(model, SETTINGS)
    reset_adapters(model)
    fill_adapters(model)
    return model


def _plain(adapted: Any) -> Any:
    """The same model with plain linear layers, without what adapters add."""
    plain = copy.deepcopy(adapted).requires_grad_(requires_grad=True)
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, AdaptedLinear):
                linear = nn.Linear(child.in_features, child.out_features, bias=False)
                linear.weight = child.weight
                linear.bias = child.bias
                setattr(parent, name, linear)
    return plain


def _logprobs(model: Any) -> Tensor:
    sequences = Sequences.from_token_ids([[3, 9, 4, 4, 17, 2], [5, 1, 8]])
    with torch.no_grad():
        indices_N = torch.tensor([1, 2, 3, 4, 5, 7, 8])
        scores = Policy(model, temperature=1.0)(sequences, indices_N)
    return cast("Tensor", scores.logprobs_N)


def test_version_0_is_the_base_to_the_bit(ranks: Ranks) -> None:
    policy, _ = adapted_policy(ranks)
    base = tiny_policy(ranks.mesh)

    assert published_bytes(policy.causal_lm) == published_bytes(base.causal_lm)
    assert probe_logprobs(policy, PROBE) == probe_logprobs(base, PROBE)
    rounded = [rounded_logprobs(each, PROBE, dtype=torch.bfloat16) for each in (policy, base)]
    assert rounded[0] == rounded[1], "adapted layers are rounded as others are"


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_merged_weights_score_as_adapters_do(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    adapted = _adapted(family, dtype)
    merged = _plain(adapted)
    for name, module in adapted.named_modules():
        if isinstance(module, AdaptedLinear):
            merged.get_submodule(name).weight = nn.Parameter(module.merged(dtype))

    differences = (_logprobs(adapted) - _logprobs(merged)).abs()

    assert (_logprobs(adapted) - _logprobs(_plain(adapted))).abs().max() > 0.1
    assert differences.max() <= tolerance


class _Product(nn.Module):
    """W + s * B @ A, written out."""

    def __init__(self, module: AdaptedLinear) -> None:
        super().__init__()
        self.a = nn.Parameter(module.lora_a.detach().clone())
        self.b = nn.Parameter(module.lora_b.detach().clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 5.0 / 3.0 * self.b @ self.a


def _errors(family: str = "qwen3") -> list[float]:
    """Relative errors of the gradients of all adapters."""
    adapted = _adapted(family, torch.float64)
    dense = _plain(adapted).requires_grad_(requires_grad=False)
    products: dict[str, Any] = {}
    for name, module in adapted.named_modules():
        if isinstance(module, AdaptedLinear):
            products[name] = _Product(module)
            parametrize.register_parametrization(
                dense.get_submodule(name), "weight", products[name], unsafe=True
            )
    for model in (adapted, dense):
        train(Policy(model, temperature=1.0), packed(EPISODES, 24))
    found = []
    for name, product in products.items():
        module = adapted.get_submodule(name)
        for ours, theirs in ((module.lora_a, product.a), (module.lora_b, product.b)):
            found.append(float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    assert len(found) == 2 * 2 * 7
    return found


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gradients_are_those_of_the_product_written_out(family: str) -> None:
    assert max(_errors(family)) <= EXACT


def _without_scale(self: AdaptedLinear, inputs: Tensor) -> Tensor:
    low = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
    return functional.linear(inputs, self.weight, self.bias) + low


def _rank_mixed_up(self: AdaptedLinear, inputs: Tensor) -> Tensor:
    low = functional.linear(inputs, self.lora_a).flip(-1)
    return functional.linear(inputs, self.weight) + self.scale * functional.linear(low, self.lora_b)


@pytest.mark.parametrize("wrong", [_without_scale, _rank_mixed_up])
def test_a_wrong_adapter_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(AdaptedLinear, "forward", wrong)

    assert max(_errors()) > 0.01


def test_adapters_alone_are_trained_however_memory_is_saved(ranks: Ranks) -> None:
    found = []
    for more in ({}, {"activations": "full", "offload": ("parameters",)}):
        policy, optimizer = adapted_policy(ranks, **cast("Any", more))
        frozen = published_bytes(policy.causal_lm, is_merged=False)
        microbatches = packed(EPISODES, 24)
        for step in (1, 2):
            trained = train_batch(policy, optimizer, step, microbatches, settings=LOSS, ranks=ranks)
            assert trained.outcome.grad_norm > 0

        assert published_bytes(policy.causal_lm, is_merged=False) == frozen
        assert published_bytes(policy.causal_lm) != frozen
        assert len(optimizer.parameters) == 2 * 2 * 7
        found.append(parameters_of(policy, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_frozen_weights_are_those_that_are_published(ranks: Ranks) -> None:
    policy, _ = adapted_policy(ranks, dtype="bfloat16")
    weight = policy.causal_lm.get_parameter("model.layers.0.mlp.up_proj.weight")

    assert torch.equal(weight, weight.bfloat16().float())
    assert published_bytes(policy.causal_lm, "bfloat16") == published_bytes(
        tiny_causal_lm(), "bfloat16"
    )


def test_a_model_without_linear_modules_is_refused() -> None:
    model = tiny_causal_lm(layers=1)
    model.base_model.layers = nn.ModuleList([nn.LayerNorm(4)])

    with pytest.raises(SettingsError, match=r"learner.lora_rank must be 0 for a model whose"):
        adapt(model, LearnerSettings(lora_rank=2))
