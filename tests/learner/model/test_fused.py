"""Layers by kernels, run by Triton's interpreter: those of transformers, forwards and backwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from actors.weights.probe import LogprobDifference
from configs.settings import LearnerSettings
from learner.model import fused, policy
from learner.model.compilers import has_kernels
from learner.model.fused import fuse_layers
from learner.model.lora import adapt, reset_adapters
from learner.model.policy import Policy, freeze, probe_logprobs, rounded_logprobs, shard
from learner.model.ranks import Ranks
from tests.learner.support.adapted_policy import fill_adapters
from tests.learner.support.exact_gradients import EXACT, assert_equal, make_model, packed, train
from tests.learner.support.interpreted_kernels import counted_launches, interpreted_kernels
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.random_models import ARCHITECTURES, make_random_model
from tests.needs import needs

pytestmark = [
    needs("Triton"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # interpreter
]
FUSED = [name for name in ARCHITECTURES if not name.startswith("cohere")]
PARTS = ("RMSNorm", "MLP", "Attention")
FAR = 2**31


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """Have layers computed by them, on a CPU too."""
    with interpreted_kernels() as kernels:
        yield kernels


def _fused(causal_lm: Any) -> Any:
    fuse_layers(causal_lm.modules(), "cpu")
    return causal_lm


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FUSED)
def test_gradients_are_those_of_transformers(family: str) -> None:
    microbatches = packed(random_group_episodes(3, 2, seed=1), microbatch_tokens=40)
    plain, ours = (make_model(family, torch.float64) for _ in range(2))

    found = train(Policy(_fused(ours), temperature=0.7), microbatches)

    assert any(each.sequences.seen is not None for each in microbatches), "shared prompts"
    assert_equal(found, train(Policy(plain, temperature=0.7), microbatches), EXACT)
    kinds = {part for m in ours.modules() for part in PARTS if type(m).__name__.endswith(part)}
    own = {
        p
        for m in ours.modules()
        for p in PARTS
        if type(m).__name__.endswith(p) and "forward" in vars(m)
    }
    assert own == kinds == {*PARTS}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_gradients_of_adapters_and_of_weights_that_are_not_tied(family: str) -> None:
    microbatches = packed(random_group_episodes(2, 2, seed=2), microbatch_tokens=60)
    found = []
    for is_fused in (True, False):
        causal_lm = make_random_model(family, tie_word_embeddings=False).double()
        adapt(causal_lm, LearnerSettings(lora_rank=2))
        reset_adapters(causal_lm)
        fill_adapters(causal_lm)
        if is_fused:
            fuse_layers(causal_lm.modules(), "cpu")
        found.append(train(Policy(causal_lm, temperature=1.0), microbatches))

    assert_equal(found[0], found[1], EXACT)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FUSED)
def test_gradients_of_products_that_are_joined(family: str, ranks: Ranks) -> None:
    microbatches = packed(random_group_episodes(2, 2, seed=3), microbatch_tokens=60)
    ours = Policy(make_model(family, torch.float32), temperature=0.7)
    with mock.patch.object(policy, "has_kernels", return_value=True):
        shard(ours, ranks.mesh, dtype=torch.float64)
    plain = Policy(make_model(family, torch.float64), temperature=0.7)
    found, products = [], []
    for made in (ours, plain):
        with counted_launches() as launches:
            found.append(train(made, microbatches))
        products.append(launches.counts["mm"] + launches.counts["addmm"])

    assert_equal(found[0], found[1], 1e-6)
    assert products[0] < 0.75 * products[1] or family == "phi3", "whose weights are joined"


def test_angles_of_other_shapes_are_left_to_transformers(kernels: ModuleType) -> None:
    seen = []

    def plain(*given: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(given)
        return given[0], given[1]

    q, cos = torch.randn(1, 2, 5, 16), torch.randn(1, 5, 8)
    assert fused._rotate(plain, q, q, cos, cos)[0] is q and len(seen) == 1, "a part of each head"
    fused._rotate(plain, q.repeat(2, 1, 1, 1), q, cos, cos)
    assert len(seen) == 2, "several rows"
    wide = torch.randn(1, 5, 16)
    assert fused._rotate(plain, q, q, wide, wide)[0].shape == q.shape and len(seen) == 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_frozen_policies_and_those_of_which_nothing_is_copied_score_alike(
    family: str, ranks: Ranks
) -> None:
    probe = (3, 9, 4, 17)
    found = []
    for dtype in (torch.float64, torch.float32):
        made = Policy(make_model(family, torch.float32), temperature=1.0)
        with mock.patch.object(policy, "has_kernels", return_value=True):
            shard(made, ranks.mesh, dtype=dtype)
        found.append(probe_logprobs(freeze(made), probe))

    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.fixture
def vast(tmp_path: Path) -> Tensor:
    """Zeros on both sides of the first element, as many as 32 bits can count; few have memory."""
    size = 2 * FAR + 1024
    return torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.half)[FAR:]


def test_places_far_from_the_first_are_counted_in_64_bits(
    kernels: ModuleType, vast: Tensor
) -> None:
    """Rows, heads and tokens that lie two thousand million elements behind."""
    step, width = FAR // 2, 16
    last = 2 * step
    near = torch.randn(1, 3, 1, width, dtype=torch.float16)
    far = vast.as_strided(near.shape, (0, step, width, 1))
    assert far.storage_offset() + last >= 2**31
    for number in range(3):
        far[0, number] = near[0, number]
    weight, angles = torch.randn(width).half(), torch.randn(1, width).half()

    def found(x: Tensor) -> list[Tensor]:
        of_rows = kernels.Norm.apply(x, weight, 1e-6, 0.0, True)
        turned = kernels.Rotate.apply(x, x, angles, angles)
        return [of_rows, *turned, kernels.Gate.apply(x[0, :, 0], x[0, :, 0], True)]

    for ours, expected in zip(found(far), found(near), strict=True):
        assert torch.equal(ours, expected) and ours.abs().sum()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["cohere", "cohere2"])
def test_other_families_stay_plain(family: str) -> None:
    causal_lm = _fused(make_random_model(family))

    assert not any("forward" in vars(module) for module in causal_lm.modules())


def test_layers_on_a_cpu_and_those_that_are_compiled_stay_plain(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_kernels("cpu")
    asked: list[str] = []
    monkeypatch.setattr(policy, "fuse_layers", lambda _, device: asked.append(device))
    for compiled in (True, False):
        made = Policy(make_random_model("qwen3"), temperature=1.0)
        shard(made, ranks.mesh, dtype=torch.float32, compiled=compiled)
    assert asked == ["cpu"], "once, where nothing is compiled"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FUSED)
def test_the_probes_rounding_reaches_all_but_the_activation_within_a_kernel(family: str) -> None:
    probe = tuple(3 + 7 * place % 45 for place in range(32))
    moved, draws = [], []
    for is_fused in (False, True):
        causal_lm = make_random_model(family, initializer_range=0.1)
        made = Policy(_fused(causal_lm) if is_fused else causal_lm, temperature=1.0).eval()
        own = probe_logprobs(made, probe)
        with mock.patch.object(torch, "rand", wraps=torch.rand) as rand:
            rounded = rounded_logprobs(made, probe, dtype=torch.bfloat16)
        draws.append(rand.call_count)
        moved.append(LogprobDifference.from_logprobs(rounded, own).mean)

    layers = causal_lm.config.num_hidden_layers
    assert draws[1] == draws[0] - layers
    assert moved[1] == pytest.approx(moved[0], rel=0.4)
