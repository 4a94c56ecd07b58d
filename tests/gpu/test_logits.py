"""Log-probs, entropies and gradients by kernels on a card, beside torch's operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from configs.architecture import LogitChange
from learner.model import logits
from learner.model.logits import Softmax
from learner.model.memory_rules import CHUNK_SIZES
from learner.model.output_layer import score_tokens

pytestmark = pytest.mark.gpu
TOKENS, WIDTH, VOCABULARY = 3000, 256, 151_936
SOFTMAXES = {
    "temperature": Softmax(LogitChange(), 0.8),
    "cap": Softmax(LogitChange(factor=1.5, cap=30.0), 0.7),
}
NAMES = ("log-probs", "entropies", "of states", "of weight")


def _loss_of(rows: slice, logprobs_R: Tensor, entropies_R: Tensor) -> Tensor:
    weights_N = torch.linspace(-1, 1, TOKENS, device="cuda") / TOKENS
    weights_R = weights_N[rows].to(logprobs_R.dtype)
    return (weights_R * (logprobs_R.exp() + logprobs_R + 0.1 * entropies_R)).sum()


def _inputs(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=False, device="cuda", dtype=dtype)
    states_ND = 30 * torch.rand(TOKENS, 1) * torch.randn(TOKENS, WIDTH)
    targets_N = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    return layer, states_ND.to("cuda", dtype).requires_grad_(), targets_N


def _found(
    layer: nn.Linear, states_ND: Tensor, targets_N: Tensor, softmax: Softmax
) -> list[Tensor]:
    found = score_tokens(
        layer, states_ND, targets_N, softmax, entropy_gradient=True, loss_of=_loss_of
    )
    assert found.loss is not None
    gradients = torch.autograd.grad(found.loss, [states_ND, layer.weight])
    return [found.logprobs_N, found.entropies_N, *gradients]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose kernels or torch's operators."""
    kernels = logits.kernels_for("cuda")
    assert kernels is not None, "Triton, a C compiler and Python's headers are installed"

    def choose(by_kernels: bool) -> None:
        monkeypatch.setattr(logits, "kernels_for", lambda _: kernels if by_kernels else None)

    return choose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_kernels_are_as_near_to_float64_as_torchs_operators(
    name: str, dtype: torch.dtype, choose: Callable[[bool], None], table: list[str]
) -> None:
    layer, states_ND, targets_N = _inputs(dtype)
    choose(True)
    ours = _found(layer, states_ND, targets_N, SOFTMAXES[name])
    choose(False)
    twin = _found(layer, states_ND, targets_N, SOFTMAXES[name])
    exact = _found(
        layer.double(), states_ND.detach().double().requires_grad_(), targets_N, SOFTMAXES[name]
    )

    for part, found, by_torch, expected in zip(NAMES, ours, twin, exact, strict=True):
        error, usual = (
            float((x.double() - expected).norm() / expected.norm()) for x in (found, by_torch)
        )
        table.append(f"logits, {name}, {dtype}, {part}: {error:.2e}, by torch {usual:.2e}")
        assert error < 1.05 * usual + 1e-6


def test_they_take_the_memory_of_a_chunk_and_of_the_gradients(
    choose: Callable[[bool], None], table: list[str]
) -> None:
    layer, states_ND, targets_N = _inputs(torch.bfloat16)
    choose(True)
    _found(layer, states_ND, targets_N, SOFTMAXES["cap"])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    _found(layer, states_ND, targets_N, SOFTMAXES["cap"])

    peak = torch.cuda.max_memory_allocated() - before
    chunk = max(CHUNK_SIZES["cuda"].logits, CHUNK_SIZES["cuda"].tokens * VOCABULARY)
    expected = 2 * (chunk + states_ND.numel() + layer.weight.numel())
    table.append(f"logits: {peak / 2**20:.0f} MiB, of a chunk and gradients {expected / 2**20:.0f}")
    assert peak < expected + 16 * 2**20
