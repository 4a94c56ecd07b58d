"""Scores against the plain forward pass of transformers, whole and in chunks, sharded and not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import OPTConfig, OPTForCausalLM

from configs.errors import SettingsError
from learner.algorithm.microbatch import Sequences
from learner.model.memory_rules import CHUNK_SIZES, ChunkSize
from learner.model.policy import Policy, probe_logprobs, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from tests.learner.support.ranks.forced_shards import forced_shards
from tests.learner.support.tiny_policy import (
    VOCABULARY,
    save_tiny_model,
    tiny_causal_lm,
    tiny_policy,
)

LENGTHS = [3, 7, 5]


def _batch() -> tuple[Sequences, Tensor]:
    """Three packed sequences, and the places of all their tokens but the first."""
    torch.manual_seed(1)
    sequences = Sequences.from_token_ids(
        [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]
    )
    return sequences, torch.arange(sum(LENGTHS))[sequences.positions_T > 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_of_packed_sequences_equal_those_of_each_alone(temperature: float) -> None:
    policy, plain = tiny_policy(temperature=temperature), tiny_causal_lm()
    sequences, indices_N = _batch()

    scores = policy(sequences, indices_N)

    expected, entropies = [], []
    for alone in sequences.token_ids_T.split(LENGTHS):
        logits = plain(input_ids=alone[None]).logits[0, :-1].double() / temperature
        log_pi = logits.log_softmax(-1)
        expected.append(log_pi.gather(-1, alone[1:, None]).squeeze(-1))
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
    assert torch.allclose(scores.logprobs_N.double(), torch.cat(expected), atol=1e-5)
    assert torch.allclose(scores.entropies_N.double(), torch.cat(entropies), atol=1e-5)


def _gradients(policy: Policy) -> tuple[float, list[Tensor]]:
    policy.zero_grad()
    scores = policy(*_batch(), entropy_gradient=True)
    loss = (scores.logprobs_N * torch.linspace(-1, 1, len(scores.logprobs_N))).sum()
    loss = loss + scores.entropies_N.sum()
    loss.backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return loss.item(), [g.clone() for g in whole]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1000, 5])
def test_neither_shards_nor_chunks_change_scores_and_gradients(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, *, tied: bool
) -> None:
    loss, gradients = _gradients(Policy(tiny_causal_lm(tied=tied), temperature=1.0))
    monkeypatch.setitem(CHUNK_SIZES, "cpu", ChunkSize(logits=0, tokens=chunk_tokens))
    whole = Policy(tiny_causal_lm(tied=tied), temperature=1.0)

    with forced_shards():
        sharded = shard(whole, ranks.mesh, dtype=torch.float32)
    sharded_loss, sharded_gradients = _gradients(sharded)

    assert sharded_loss == pytest.approx(loss, abs=1e-5)
    for ours, expected in zip(sharded_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=5e-6)


def test_entropies_carry_a_gradient_only_where_asked() -> None:
    policy = tiny_policy()

    assert not policy(*_batch()).entropies_N.requires_grad
    assert policy(*_batch(), entropy_gradient=True).entropies_N.requires_grad


def test_a_probe_leaves_the_parameters_sharded(ranks: Ranks) -> None:
    with forced_shards():
        policy, plain = tiny_policy(ranks.mesh, temperature=0.5), tiny_causal_lm()
    token_ids = (4, 9, 3, 17)

    logprobs = probe_logprobs(policy, token_ids)

    logits = plain(input_ids=torch.tensor([token_ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None]).squeeze(-1)
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)  # at temperature 1
    assert all(hasattr(parameter, "full_tensor") for parameter in policy.parameters())


def test_a_saved_model_is_loaded_in_float32(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)

    causal_lm = load_causal_lm(tmp_path)

    assert {parameter.dtype for parameter in causal_lm.parameters()} == {torch.float32}


def test_a_model_without_a_list_of_layers_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    config = OPTConfig(
        hidden_size=8,
        word_embed_proj_dim=8,
        ffn_dim=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=20,
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(SettingsError, match=r"layers in a list named layers, .* got OPTModel"):
        load_causal_lm(tmp_path)


def test_a_missing_model_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run.model must be .* got '.*nowhere'"):
        load_causal_lm(tmp_path / "nowhere")


def test_tied_and_untied_models_score_alike_in_form() -> None:
    for tied in (True, False):
        policy = Policy(tiny_causal_lm(tied=tied), temperature=1.0)
        assert policy(*_batch()).logprobs_N.shape == (sum(LENGTHS) - 3,)
