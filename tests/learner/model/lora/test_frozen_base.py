"""A frozen base in 16 or 4 bits: its values, gradients beside it, what actors get, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from broker.protocol.manifest import digest_of
from broker.weights.low_rank import apply_adapter
from configs.errors import SettingsError
from configs.settings import Settings
from learner.assembly import load_policy, load_reference
from learner.model.frozen import FrozenProduct, levels, pack, unpack
from learner.model.lora import adapt
from learner.model.memory_rules import FOUR_BIT_BLOCK as BLOCK
from learner.model.policy import Policy, probe_logprobs, rounded_logprobs
from learner.model.ranks import Ranks
from learner.model.saved_model import layers_of, local_of
from learner.training.optimizer import ScheduledOptimizer
from learner.training.preparation import prepare, score
from learner.training.step import train_batch
from learner.weights.gather import adapted_weights, gather_adapter
from learner.weights.layout import layout
from tests.learner.support.adapted_policy import (
    PACKED,
    SETTINGS,
    WIDE,
    adapted_policy,
    fill_adapters,
    published_bytes,
)
from tests.learner.support.exact_gradients import SETTINGS as LOSS
from tests.learner.support.exact_gradients import packed, train
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.tiny_policy import (
    parameters_of,
    save_tiny_model,
    tiny_causal_lm,
)
from tests.weights.support.scripted_publisher import manifest

PROBE = (3, 9, 4, 4, 17)
EPISODES = random_group_episodes(4, 3, seed=1)
PUBLISHED_LEVELS = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Of NF4 as it was published."""


def _policy(
    ranks: Ranks, base: str, *, model: Any = None, **more: Any
) -> tuple[Policy, ScheduledOptimizer]:
    """Make a policy of a base that is published in bfloat16."""
    settings = SETTINGS.model_copy(update={"base_dtype": base})
    model = model or tiny_causal_lm(width=WIDE)
    policy, optimizer = adapted_policy(
        ranks, settings=settings, dtype="bfloat16", causal_lm=model, **more
    )
    fill_adapters(policy)
    return policy, optimizer


def _rounded_model() -> Any:
    """A model whose weights are already those of a base in 4 bits."""
    model = tiny_causal_lm(width=WIDE)
    with torch.no_grad():
        for layer in layers_of(model.base_model):
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.weight.copy_(unpack(*pack(module.weight)))
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def _trained(policy: Policy, optimizer: ScheduledOptimizer, ranks: Ranks) -> list[Any]:
    """Train two batches; what came of it."""
    losses = [
        train_batch(policy, optimizer, step, packed(EPISODES, 24), settings=LOSS, ranks=ranks).loss
        for step in (1, 2)
    ]
    adapters = [local_of(parameter).clone() for parameter in optimizer.parameters]
    wire = published_bytes(policy.causal_lm, "bfloat16")
    rounded = rounded_logprobs(policy, PROBE, dtype=torch.bfloat16)
    return [losses, adapters, wire, probe_logprobs(policy, PROBE), rounded]


def _assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == expected[0] and found[2:] == expected[2:]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_the_levels_are_those_that_were_published() -> None:
    assert torch.equal(levels(), torch.tensor(PUBLISHED_LEVELS).bfloat16())


def test_each_element_becomes_the_nearest_level_of_its_block() -> None:
    torch.manual_seed(0)
    weight_NM = torch.randn(6, 2 * BLOCK)
    weight_NM[2, BLOCK:] = 0

    codes_NH, scales_NB = pack(weight_NM)

    scales_NM = weight_NM.unflatten(1, (-1, BLOCK)).abs().amax(-1).bfloat16().float()
    choices_NBKL = scales_NM[..., None, None] * levels().float()
    wanted_NBK1 = weight_NM.unflatten(1, (-1, BLOCK))[..., None]
    nearest_NBK1 = (choices_NBKL - wanted_NBK1).abs().argmin(-1, keepdim=True)
    nearest_NM = choices_NBKL.expand(-1, -1, BLOCK, -1).gather(-1, nearest_NBK1).flatten(1)
    assert codes_NH.shape == (6, BLOCK) and codes_NH.dtype == torch.uint8
    assert torch.equal(unpack(codes_NH, scales_NB), nearest_NM.bfloat16())
    assert not unpack(codes_NH, scales_NB)[2, BLOCK:].any()
    relative = (unpack(codes_NH, scales_NB).float() - weight_NM).norm() / weight_NM.norm()
    assert 0.08 < relative < 0.1


def test_a_frozen_product_has_the_gradient_of_the_values_that_it_stands_for() -> None:
    torch.manual_seed(0)
    kept = pack(torch.randn(5, BLOCK))
    bias_N, inputs = torch.randn(5), torch.randn(2, 3, BLOCK, requires_grad=True)
    plain = inputs.detach().clone().requires_grad_()
    expected = nn.functional.linear(plain, unpack(*kept).float(), bias_N)

    found: Tensor = FrozenProduct.apply(inputs, *kept, bias_N)

    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(found, expected)
    assert inputs.grad is not None and plain.grad is not None
    assert torch.allclose(inputs.grad, plain.grad, rtol=1e-5)


@pytest.mark.parametrize("computes_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_what_is_trained_beside_fewer_bits_is_what_their_values_in_float32_give(
    ranks: Ranks, base: str, computes_in: torch.dtype
) -> None:
    kept = _policy(ranks, base, computes_in=computes_in)
    wide = _policy(
        ranks,
        "float32",
        model=_rounded_model() if base == "nf4" else None,
        computes_in=computes_in,
    )

    _assert_alike(_trained(*kept, ranks), _trained(*wide, ranks))


@pytest.mark.parametrize(
    "more",
    [
        {"activations": "full"},
        {"activations": "selective"},
        {"activations": "full", "offload": ("parameters",)},
        {
            "computes_in": torch.bfloat16,
            "offload": ("parameters", "activations"),
            "activations": "full",
        },
    ],
)
def test_four_bits_go_with_whatever_saves_memory(ranks: Ranks, more: dict[str, Any]) -> None:
    plain = _policy(ranks, "nf4", computes_in=more.get("computes_in", torch.float32))

    found = _trained(*_policy(ranks, "nf4", **more), ranks)

    _assert_alike(found, _trained(*plain, ranks))


def test_four_bits_move_gradients_little_and_bfloat16_not_at_all(ranks: Ranks) -> None:
    found = []
    for base in ("float32", "bfloat16", "nf4"):
        model = tiny_causal_lm(width=WIDE)
        for parameter in model.parameters():  # so small that layers are nearly linear
            parameter.data *= 0.3
        policy, _ = _policy(ranks, base, model=model)
        loss, gradients = train(policy, packed(EPISODES, 24))
        found.append((loss, torch.cat([each.flatten() for each in gradients])))
    (_, wide), (loss, same), (their_loss, four_bits) = found

    assert torch.equal(wide, same)
    assert abs(their_loss - loss) < 0.05
    assert 0.8 < float(torch.cosine_similarity(same, four_bits, dim=0)) < 0.999


def test_actors_merge_the_adapter_with_the_values_of_four_bits(ranks: Ranks) -> None:
    model = _policy(ranks, "nf4")[0].causal_lm
    base = published_bytes(model, "bfloat16", is_merged=False)
    spec, adapter = gather_adapter(model, digest_of([base]), adapted_weights(model))
    version = structs.replace(
        manifest(1), num_bytes=len(base), tensors=layout(model, "bfloat16"), adapter=spec
    )
    memory = bytearray(base)

    apply_adapter(adapter, memory, version)

    assert base == published_bytes(_rounded_model(), "bfloat16")
    assert memory == published_bytes(model, "bfloat16") != base


def _settings(folder: Path, **learner: Any) -> Settings:
    save_tiny_model(folder / "model", width=WIDE)
    return Settings.model_validate(
        {
            "run": {"model": str(folder / "model"), "environment": "calculator"},
            "learner": {"lora_rank": 3, "lora_alpha": 5.0, "device": "cpu", **learner},
            "algorithm": {"kl_coefficient": 0.1},
        }
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_read_into_four_bits(tmp_path: Path, ranks: Ranks, dtype: str) -> None:
    settings = _settings(tmp_path, base_dtype="nf4")
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"dtype": dtype})})

    read = load_policy(settings, ranks, is_trained=True)

    made, optimizer = adapted_policy(
        ranks, settings=PACKED, dtype=dtype, vocabulary=read.vocabulary
    )
    ours, theirs = parameters_of(read, optimizer), parameters_of(made, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert read.adapter == made.adapter is not None
    assert read.adapter is not None and read.adapter.rounding == "nf4"


def test_the_reference_is_the_policy_without_its_adapters(tmp_path: Path, ranks: Ranks) -> None:
    settings = _settings(tmp_path)
    policy = load_policy(settings, ranks, is_trained=True)
    (microbatch,) = packed(EPISODES, 512)
    before = score(policy, microbatch).logprobs_N
    fill_adapters(policy)
    after = score(policy, microbatch).logprobs_N

    reference = load_reference(settings, ranks, policy)
    (prepared,) = prepare(
        policy, [microbatch], settings=settings.algorithm, ranks=ranks, reference=reference
    )

    assert reference is policy and not torch.equal(before, after)
    assert prepared.log_ref_N is not None and torch.equal(prepared.log_ref_N, before)
    assert torch.equal(score(policy, microbatch).logprobs_N, after)
    other = settings.algorithm.model_copy(update={"reference_model": settings.run.model})
    theirs = load_reference(settings.model_copy(update={"algorithm": other}), ranks, policy)
    assert theirs is not policy


def test_a_matrix_without_whole_blocks_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"base_dtype must be bfloat16 .* got nf4 and 32 columns of mo"
    ):
        adapt(tiny_causal_lm(), SETTINGS, "nf4")
