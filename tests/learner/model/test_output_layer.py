"""Scores in chunks against full logits, in float64: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from configs.architecture import LogitChange
from learner.model import output_layer
from learner.model import output_layer as two_passes
from learner.model.logits import ALL_OF_IT, Softmax
from learner.model.memory_rules import CHUNK_SIZES, ChunkSize
from learner.model.output_layer import score_tokens

TOKENS, WIDTH, VOCABULARY = 23, 8, 31

SOFTMAXES = {
    "plain": Softmax(LogitChange(), 1.0),
    "temperature": Softmax(LogitChange(), 0.6),
    "factor": Softmax(LogitChange(factor=0.25), 0.8),
    "cap": Softmax(LogitChange(factor=1.5, cap=2.0), 0.7),
}


@pytest.fixture(autouse=True)
def _chunks_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_SIZES, "cpu", ChunkSize(logits=0, tokens=5))


@dataclass
class Case:
    """Arguments of the output layer, and how much each score weighs in the loss."""

    states_ND: Tensor
    layer: nn.Linear
    targets_N: Tensor
    slopes_2N: Tensor


def _case(dtype: torch.dtype = torch.float64, *, bias: bool = False, scale: float = 1.0) -> Case:
    torch.manual_seed(3)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    nn.init.normal_(layer.weight)
    return Case(
        (scale * torch.randn(TOKENS, WIDTH, dtype=dtype)).requires_grad_(),
        layer,
        torch.randint(VOCABULARY, (TOKENS,)),
        torch.randn(2, TOKENS, dtype=dtype),
    )


def _full(case: Case, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Scores from all logits at once, as the formulas have them."""
    logits_NV = case.layer(case.states_ND) * softmax.change.factor
    if (cap := softmax.change.cap) is not None:
        logits_NV = cap * (logits_NV / cap).tanh()
    log_pi_NV = (logits_NV / softmax.temperature).log_softmax(-1)
    entropies_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
    return log_pi_NV.gather(1, case.targets_N[:, None])[:, 0], entropies_N


def _chunked(case: Case, softmax: Softmax) -> tuple[Tensor, Tensor]:
    found = score_tokens(case.layer, case.states_ND, case.targets_N, softmax, entropy_gradient=True)
    return found.logprobs_N, found.entropies_N


Scorer = Callable[[Case, Softmax], tuple[Tensor, Tensor]]


def _found(case: Case, softmax: Softmax, scorer: Scorer) -> list[Tensor]:
    """Scores, then the gradients of a loss that is no function of single tokens."""
    logprobs_N, entropies_N = scorer(case, softmax)
    weighted_2N = case.slopes_2N * torch.stack([logprobs_N, entropies_N])
    loss = weighted_2N.sum().tanh() + (logprobs_N.mean() * entropies_N.mean())
    gradients = torch.autograd.grad(loss, [case.states_ND, *case.layer.parameters()])
    return [each.detach() for each in (logprobs_N, entropies_N, *gradients)]


def _is_close(case: Case, softmax: Softmax, tolerance: float) -> bool:
    found, expected = (_found(case, softmax, scorer) for scorer in (_chunked, _full))
    return all(
        float((ours - full).norm() / full.norm()) < tolerance
        for ours, full in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_scores_and_gradients_are_those_of_full_logits(name: str, *, bias: bool) -> None:
    assert _is_close(_case(bias=bias), SOFTMAXES[name], 1e-12)
    assert _is_close(_case(torch.float32, bias=bias), SOFTMAXES[name], 1e-5)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = _case(bias=True)
    inputs = (case.states_ND, case.layer.weight, case.layer.bias)

    def scores(states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor) -> tuple[Tensor, ...]:
        return two_passes.ScoresWithoutLoss.apply(  # type: ignore[no-any-return]
            states_ND, weight_VD, bias_V, case.targets_N, SOFTMAXES[name], ALL_OF_IT, True
        )

    assert torch.autograd.gradcheck(scores, inputs, fast_mode=True)


def test_logits_far_from_zero_do_not_overflow() -> None:
    case = _case(torch.float32, scale=200.0)

    logprobs_N, entropies_N = _chunked(case, SOFTMAXES["plain"])

    full_N, full_entropies_N = _full(case, SOFTMAXES["plain"])
    torch.testing.assert_close(logprobs_N, full_N)
    torch.testing.assert_close(entropies_N, full_entropies_N, rtol=1e-4, atol=1e-6)


def test_no_token_gives_gradients_of_zero() -> None:
    case = _case()
    nothing = score_tokens(
        case.layer,
        case.states_ND[:0],
        case.targets_N[:0],
        SOFTMAXES["plain"],
        entropy_gradient=False,
    )

    nothing[0].sum().backward()

    assert case.layer.weight.grad is not None and not case.layer.weight.grad.any()


def test_bfloat16_logits_are_widened_before_the_softmax() -> None:
    case = _case(torch.bfloat16)

    logprobs_N, entropies_N = _chunked(case, SOFTMAXES["plain"])
    (logprobs_N + entropies_N).sum().backward()

    log_pi_NV = case.layer(case.states_ND).float().log_softmax(-1)
    torch.testing.assert_close(logprobs_N, log_pi_NV.gather(1, case.targets_N[:, None])[:, 0])
    assert entropies_N.dtype == torch.float32
    assert case.layer.weight.grad is not None
    assert case.layer.weight.grad.dtype == torch.bfloat16


def test_products_may_be_in_float32_where_the_weight_is_in_bfloat16() -> None:
    case, wide = _case(torch.bfloat16, bias=True), _case(torch.bfloat16, bias=True)
    wide.layer.float()
    wide.states_ND = case.states_ND.detach().float().requires_grad_()
    softmax = SOFTMAXES["cap"]

    found = _found(case, replace(softmax, dtype=torch.float32), _chunked)

    expected = _found(wide, softmax, _full)
    for ours, full in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-5, atol=1e-5)
    for ours, full in zip(found[2:], expected[2:], strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - full).norm() < 0.01 * full.norm()
    narrow = _found(case, softmax, _chunked)
    assert (narrow[0] - expected[0]).norm() > 100 * (found[0] - expected[0]).norm()


class _Flattened(Softmax):
    def slope(self, prepared: Tensor) -> float:
        """Leave the derivative of the cap out."""
        return self.change.factor / self.temperature


def _wrong_scores(change: Callable[..., tuple[object, ...]]) -> type[torch.autograd.Function]:
    class Wrong(two_passes.ScoresWithoutLoss):
        @staticmethod
        def backward(ctx: object, *slopes: Tensor) -> tuple[object, ...]:
            return change(ctx, *slopes)

    return Wrong


def test_a_log_sum_of_another_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted:
        """The saved tensors, with log-sums from five tokens further on."""

        def __init__(self, ctx: object) -> None:
            self._ctx = ctx

        def __getattr__(self, name: str) -> object:
            found = getattr(self._ctx, name)
            if name != "saved_tensors":
                return found
            *others, log_sums_N, entropies_N = found
            return (*others, log_sums_N.roll(5), entropies_N)

    right = two_passes.ScoresWithoutLoss.backward
    wrong = _wrong_scores(lambda ctx, *slopes: right(Shifted(ctx), *slopes))
    monkeypatch.setattr(output_layer, "ScoresWithoutLoss", wrong)

    assert not _is_close(_case(), SOFTMAXES["plain"], 1e-5)


def test_the_wrong_sign_of_the_entropys_gradient_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = two_passes.ScoresWithoutLoss.backward
    wrong = _wrong_scores(lambda ctx, logprobs_N, entropies_N: right(ctx, logprobs_N, -entropies_N))
    monkeypatch.setattr(output_layer, "ScoresWithoutLoss", wrong)

    assert not _is_close(_case(), SOFTMAXES["plain"], 1e-5)


def test_a_cap_without_its_derivative_is_caught() -> None:
    assert not _is_close(_case(), _Flattened(LogitChange(cap=2.0), 1.0), 1e-5)
