"""The gradient of a loss over tokens from one pass of the output layer, beside that from two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.architecture import LogitChange
from configs.settings import AlgorithmSettings
from learner.algorithm import corrections, surrogates
from learner.algorithm.catalogue import entries
from learner.algorithm.losses import is_sum_over_tokens, policy_loss
from learner.algorithm.microbatch import PreparedMicrobatch
from learner.model.logits import Softmax
from learner.model.memory_rules import CHUNK_SIZES, ChunkSize
from learner.model.output_layer import ScoredTokens, score_tokens
from learner.model.policy import Policy
from learner.training import step
from tests.learner.support.exact_gradients import EXACT, FAMILIES, assert_equal, make_model, packed
from tests.learner.support.exact_gradients import train as train_packed
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.made_tokens import make_prepared

WIDTH, VOCABULARY = 8, 31
LENGTHS = (3, 1, 9, 7, 3)
TOKENS = sum(LENGTHS)
SOFTMAX = Softmax(LogitChange(factor=1.5, cap=2.0), 0.7)
BOUNDS = {"mask_low": 0.6, "mask_high": 1.7, "geo_low": 0.9, "geo_high": 1.1, "veto": 0.7}
BONUSES = {"entropy_bonus": 0.1, "kl_coefficient": 0.2}


@pytest.fixture(autouse=True)
def _chunks_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_SIZES, "cpu", ChunkSize(logits=0, tokens=5))


Score = Callable[..., ScoredTokens]


def _layer() -> tuple[Score, list[Tensor], Tensor]:
    """An output layer over some tokens, what gradients are by, and the log-probs that it gives."""
    torch.manual_seed(3)
    layer = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    states_ND = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    targets_N = torch.randint(VOCABULARY, (TOKENS,))
    score = partial(score_tokens, layer, states_ND, targets_N, SOFTMAX, entropy_gradient=True)
    return score, [states_ND, *layer.parameters()], score().logprobs_N.detach()


def _prepared(log_pi_N: Tensor) -> PreparedMicrobatch:
    """Tokens whose other policies are near enough that every bound acts on some of them."""
    prepared = make_prepared(
        log_pi_N + 0.4 * torch.randn(TOKENS, dtype=torch.float64),
        torch.randn(TOKENS, dtype=torch.float64),
        torch.rand(TOKENS, dtype=torch.float64),
        lengths=LENGTHS,
        lags_N=torch.randint(3, (TOKENS,)),
        log_prox_N=log_pi_N + 0.2 * torch.randn(TOKENS, dtype=torch.float64),
        log_ratio_bound=0.4,
    )
    return PreparedMicrobatch(
        prepared.microbatch,
        log_prox_N=prepared.log_prox_N,
        log_ref_N=log_pi_N + 0.3 * torch.randn(TOKENS, dtype=torch.float64),
        log_ratio_bound=prepared.log_ratio_bound,
    )


def _error(settings: AlgorithmSettings) -> float:
    """Largest difference of loss and gradients between one pass and two, relative."""
    score, inputs, log_pi_N = _layer()
    prepared = _prepared(log_pi_N)

    def loss_of(rows: slice, logprobs_R: Tensor, entropies_R: Tensor) -> Tensor:
        own = prepared.select_tokens(torch.arange(TOKENS)[rows])
        return policy_loss(logprobs_R, entropies_R, own, settings).loss

    once = score(loss_of=loss_of)
    twice = score()
    loss = policy_loss(twice.logprobs_N, twice.entropies_N, prepared, settings).loss
    assert once.loss is not None and not once.logprobs_N.requires_grad
    assert torch.equal(once.logprobs_N, twice.logprobs_N)
    found = [once.loss.detach(), *torch.autograd.grad(3 * once.loss, inputs)]
    expected = [loss.detach(), *torch.autograd.grad(3 * loss, inputs)]
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def _settings(**chosen: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(BOUNDS | BONUSES | chosen)


@pytest.mark.parametrize("proximal", ["behaviour", "recomputed", "interpolated"])
@pytest.mark.parametrize("surrogate", sorted(surrogates.OF_TOKENS))
@pytest.mark.parametrize("correction", sorted(corrections.OF_TOKENS))
def test_losses_over_tokens_have_the_gradient_of_two_passes(
    correction: str, surrogate: str, proximal: str
) -> None:
    settings = _settings(correction=correction, surrogate=surrogate, proximal=proximal)

    assert is_sum_over_tokens(settings)
    assert _error(settings) < EXACT


@pytest.mark.parametrize(
    "chosen",
    [
        *({"surrogate": name} for name in sorted({*surrogates.SURROGATES} - surrogates.OF_TOKENS)),
        *(
            {"correction": name}
            for name in sorted({*corrections.CORRECTIONS} - corrections.OF_TOKENS)
        ),
    ],
    ids=str,
)
def test_losses_over_sequences_would_be_wrong_in_one_pass(chosen: dict[str, str]) -> None:
    settings = _settings(**chosen)

    assert not is_sum_over_tokens(settings)
    assert _error(settings) > 1e-4


def test_the_catalogue_calls_the_same_ones_those_of_tokens() -> None:
    kinds = {
        setting: {e.name for e in entries() if e.setting == setting and e.kind.startswith("token")}
        for setting in ("algorithm.surrogate", "algorithm.correction")
    }

    assert kinds["algorithm.surrogate"] == surrogates.OF_TOKENS
    assert kinds["algorithm.correction"] == corrections.OF_TOKENS


def test_no_token_gives_a_loss_of_zero() -> None:
    layer = nn.Linear(WIDTH, VOCABULARY)
    states_ND = torch.zeros(0, WIDTH, requires_grad=True)
    targets_N = torch.zeros(0, dtype=torch.int64)

    found = score_tokens(
        layer, states_ND, targets_N, SOFTMAX, entropy_gradient=False, loss_of=_never
    )
    assert found.loss is not None
    found.loss.backward()

    assert found.loss == 0
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def _never(rows: slice, logprobs_R: Tensor, entropies_R: Tensor) -> Tensor:
    raise AssertionError(rows, logprobs_R, entropies_R)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_step_has_the_gradient_of_two_passes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tied embeddings, soft caps, a factor of the logits, and prompts that are there once."""
    microbatches = packed(random_group_episodes(4, 3, seed=1), 1000)
    assert microbatches[0].sequences.seen is not None
    once = train_packed(Policy(make_model(family, torch.float64), temperature=0.8), microbatches)
    monkeypatch.setattr(step, "is_sum_over_tokens", lambda _: False)

    twice = train_packed(Policy(make_model(family, torch.float64), temperature=0.8), microbatches)

    assert_equal(once, twice, EXACT)
