"""The kernels for logits by Triton's interpreter, against full logits in float64 and their twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from configs.architecture import LogitChange
from learner.model import logits
from learner.model.logits import ALL_OF_IT, LogitChunk, LossDerivatives, Softmax
from learner.model.memory_rules import CHUNK_SIZES, ChunkSize
from learner.model.output_layer import ScoredTokens, score_tokens
from learner.model.policy import Policy
from tests.learner.support.exact_gradients import ROUNDED, assert_equal, make_model, packed
from tests.learner.support.exact_gradients import train as train_packed
from tests.learner.support.fresh_kernels import LOGITS, fresh_kernels
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.ranks.divided_logits import FIRST, scored, whole
from tests.learner.support.ranks.several_ranks import run_ranks
from tests.needs import needs

pytestmark = [
    needs("Triton"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

TOKENS, WIDTH, VOCABULARY = 11, 8, 37
BLOCK = 16  # three in a row of logits, the last not full
SOFTMAXES = {
    "temperature": Softmax(LogitChange(), 0.6),
    "factor": Softmax(LogitChange(factor=0.25), 0.8),
    "cap": Softmax(LogitChange(factor=1.5, cap=2.0), 0.7),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    """The kernels, run by Triton's interpreter."""
    with fresh_kernels(LOGITS, interpreted=True) as kernels:
        yield kernels


@pytest.fixture
def choose(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModuleType | None], None]:
    """Choose kernels, or None for torch's operators; the kernels at first."""
    monkeypatch.setitem(CHUNK_SIZES, "cpu", ChunkSize(logits=0, tokens=5))
    monkeypatch.setattr(interpreted, "BLOCK", BLOCK)

    def choose(kernels: ModuleType | None) -> None:
        monkeypatch.setattr(logits, "kernels_for", lambda _: kernels)

    choose(interpreted)
    return choose


@pytest.fixture
def _kernels(choose: Callable[[ModuleType | None], None]) -> None:
    """Have them chosen."""


def _layer(dtype: torch.dtype, scale: float = 1.0) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(3)
    layer = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    nn.init.normal_(layer.weight)
    states_ND = (scale * torch.randn(TOKENS, WIDTH)).to(dtype).requires_grad_()
    return layer, states_ND, torch.randint(VOCABULARY, (TOKENS,))


def _loss_of(rows: slice, logprobs_R: Tensor, entropies_R: Tensor) -> Tensor:
    """A sum over tokens, a third of which count nothing."""
    torch.manual_seed(5)
    weights_N = torch.randn(TOKENS) * (torch.arange(TOKENS) % 3 > 0)
    weights_R = weights_N[rows].to(logprobs_R.dtype)
    return (weights_R * (logprobs_R.exp() + 0.5 * entropies_R)).sum()


def _full(layer: nn.Linear, states_ND: Tensor, targets_N: Tensor, softmax: Softmax) -> list[Tensor]:
    """Scores and gradients from all logits at once, in float64."""
    inputs = [x.detach().double().requires_grad_() for x in (states_ND, layer.weight, layer.bias)]
    logits_NV = nn.functional.linear(*inputs) * softmax.change.factor
    if (cap := softmax.change.cap) is not None:
        logits_NV = cap * (logits_NV / cap).tanh()
    log_pi_NV = (logits_NV / softmax.temperature).log_softmax(-1)
    entropies_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
    logprobs_N = log_pi_NV.gather(1, targets_N[:, None])[:, 0]
    loss = _loss_of(slice(None), logprobs_N, entropies_N)
    found = loss, logprobs_N, entropies_N, *torch.autograd.grad(loss, inputs)
    return [x.detach() for x in found]


def _found(
    layer: nn.Linear, states_ND: Tensor, targets_N: Tensor, softmax: Softmax, *, passes: int
) -> list[Tensor]:
    found: ScoredTokens = score_tokens(
        layer,
        states_ND,
        targets_N,
        softmax,
        entropy_gradient=True,
        loss_of=_loss_of if passes == 1 else None,
    )
    loss = found.loss
    if loss is None:
        loss = _loss_of(slice(None), found.logprobs_N, found.entropies_N)
    gradients = torch.autograd.grad(loss, [states_ND, *layer.parameters()])
    return [loss, found.logprobs_N, found.entropies_N, *gradients]


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative."""
    pairs = zip(found, expected, strict=True)
    return max(
        float((x.detach().double() - y.detach()).norm() / y.detach().norm()) for x, y in pairs
    )


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_scores_and_gradients_are_those_of_full_logits(name: str, passes: int) -> None:
    arguments = (*_layer(torch.float32), SOFTMAXES[name])

    assert _error(_found(*arguments, passes=passes), _full(*arguments)) < 2e-6


@pytest.mark.parametrize("name", SOFTMAXES)
def test_bfloat16_is_rounded_as_by_torch(
    name: str, interpreted: ModuleType, choose: Callable[[ModuleType | None], None]
) -> None:
    arguments = (*_layer(torch.bfloat16), SOFTMAXES[name])
    ours = _found(*arguments, passes=1)
    choose(None)

    twin = _found(*arguments, passes=1)

    expected = _full(*arguments)
    assert [x.dtype for x in ours] == [x.dtype for x in twin]
    assert _error(ours[:3], [x.double() for x in twin[:3]]) < 2e-6
    # The interpreter cuts where a card rounds; `tests/gpu/test_logits.py` asks for more.
    assert _error(ours, expected) < 2 * _error(twin, expected)


@pytest.mark.usefixtures("_kernels")
def test_logits_far_from_zero_do_not_overflow() -> None:
    arguments = (*_layer(torch.float32, scale=300.0), Softmax(LogitChange(), 1.0))

    found = _found(*arguments, passes=1)

    _, logprobs_N, entropies_N, *_ = _full(*arguments)
    assert logprobs_N.min() < -1000
    torch.testing.assert_close(found[1].double(), logprobs_N, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(found[2].double(), entropies_N, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.usefixtures("_kernels")
def test_a_token_that_counts_nothing_has_no_gradient() -> None:
    arguments = (*_layer(torch.float32), SOFTMAXES["temperature"])

    of_states_ND = _found(*arguments, passes=1)[3]

    assert of_states_ND.any(1).tolist() == [n % 3 > 0 for n in range(TOKENS)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_shows_as_by_torch_and_stays_in_its_row(
    bad: float, interpreted: ModuleType, choose: Callable[[ModuleType | None], None]
) -> None:
    def finite(kernels: ModuleType | None) -> list[list[bool]]:
        choose(kernels)
        torch.manual_seed(0)
        logits_CV = torch.randn(4, VOCABULARY)
        logits_CV[1, 20] = bad
        scratch = torch.empty(3, 4, VOCABULARY)
        chunk = LogitChunk(
            slice(0, 4),
            logits_CV,
            torch.tensor([1, 2, 20, 36]),
            softmax=Softmax(LogitChange(), 1.0),
            scratch=lambda: scratch,
            part=ALL_OF_IT,
        )
        found = chunk.statistics()
        ones_C = torch.ones(4)
        chunk.differentiate(found.log_sums_C, found.entropies_C, LossDerivatives(ones_C, ones_C))
        numbers = found.logprobs_C, found.entropies_C, chunk.logits_CV.sum(1)
        return [x.isfinite().tolist() for x in numbers]

    ours = finite(interpreted)

    assert ours == finite(None)
    assert [row[0] and row[2] and row[3] for row in ours] == [True] * 3
    assert not all(row[1] for row in ours)


@pytest.mark.usefixtures("_kernels")
def test_a_frozen_head_has_no_gradient_of_its_weight() -> None:
    layer, states_ND, targets_N = _layer(torch.float32)
    layer.requires_grad_(requires_grad=False)

    found = score_tokens(
        layer, states_ND, targets_N, SOFTMAXES["cap"], entropy_gradient=True, loss_of=_loss_of
    )
    assert found.loss is not None
    (of_states_ND,) = torch.autograd.grad(found.loss, states_ND)

    expected = _full(layer, states_ND, targets_N, SOFTMAXES["cap"])[3]
    assert _error([of_states_ND], [expected]) < 2e-6


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_packed_step_is_that_of_torchs_operators(
    family: str, choose: Callable[[ModuleType | None], None]
) -> None:
    """With tied embeddings, a soft cap, and prompts that are there once."""
    microbatches = packed(random_group_episodes(2, 3, seed=1), 1000)
    assert microbatches[0].sequences.seen is not None
    ours = train_packed(Policy(make_model(family, torch.float32), temperature=0.8), microbatches)
    choose(None)

    twin = train_packed(Policy(make_model(family, torch.float32), temperature=0.8), microbatches)

    assert_equal(ours, twin, ROUNDED)


def test_two_ranks_with_half_of_the_vocabulary_each_score_as_one(
    tmp_path: Path, choose: Callable[[ModuleType | None], None]
) -> None:
    choose(None)
    alone = scored(whole(), ALL_OF_IT)

    run_ranks(tmp_path, ("divided_logits", 2))

    found = [torch.load(tmp_path / f"found-{rank}.pt") for rank in (0, 1)]
    for ours in found:
        torch.testing.assert_close(ours[:4], alone[:4], rtol=1e-5, atol=1e-6)
    of_weight_VD = torch.cat([ours[4] for ours in found])
    assert len(found[0][4]) == FIRST
    torch.testing.assert_close(of_weight_VD, alone[4], rtol=1e-5, atol=1e-6)


class _Launches(TorchDispatchMode):
    """Counts operators that compute or copy; views launch nothing."""

    FREE = (
        *("view", "slice", "select", "t.", "transpose", "detach", "unsqueeze", "split", "alias"),
        *("new_empty", "empty", "_unsafe_view", "expand", "promote_types"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not name.startswith(self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_chunk_takes_three_products_two_kernels_and_its_loss(
    interpreted: ModuleType,
    choose: Callable[[ModuleType | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's operators take a dozen launches for each of sixteen blocks, twice."""
    monkeypatch.setitem(CHUNK_SIZES, "cpu", ChunkSize(logits=0, tokens=TOKENS))
    layer, states_ND, targets_N = _layer(torch.float32)
    own: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(interpreted, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            own.append(name)
            with torch.utils._python_dispatch._disable_current_modes():
                return call(*args, **kwargs)

        return launch

    for name in ("measure", "differentiate"):
        monkeypatch.setattr(interpreted, name, counted(name))

    def launches() -> list[str]:
        launched = _Launches()
        with launched:
            score_tokens(
                layer,
                states_ND,
                targets_N,
                SOFTMAXES["temperature"],
                entropy_gradient=False,
                loss_of=lambda _rows, logprobs_R, _entropies_R: logprobs_R.sum(),
            )
        return launched.names

    ours = launches()
    choose(None)
    twin = launches()

    assert own == ["measure", "differentiate"]
    assert sum(name.startswith(("mm", "addmm")) for name in ours) == 3
    assert len(ours) + len(own) <= 25, ours
    assert len(twin) > 8 * len(ours)
