"""Architectures that depart from the common decoder: the policy scores as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from configs.architecture import LogitChange, attention_of
from configs.errors import SettingsError
from configs.settings import RunSettings, Settings
from learner.algorithm.microbatch import Sequences
from learner.assembly import load_policy
from learner.model.logits import Softmax
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from tests.learner.support.random_models import ARCHITECTURES, save_random_model


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_policy_scores_as_the_models_own_forward_pass(
    tmp_path: Path, ranks: Ranks, model_type: str
) -> None:
    save_random_model(tmp_path, model_type)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    token_ids_BT = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(1))
    indices_N = torch.tensor([3, 4, 11, 12 + 1, 12 + 11])

    policy = shard(
        Policy(load_causal_lm(tmp_path), temperature=0.7), ranks.mesh, dtype=torch.float32
    )
    scores = policy(Sequences.from_token_ids([*token_ids_BT.numpy()]), indices_N)

    log_pi_BTV = (expected(token_ids_BT).logits / 0.7).log_softmax(-1)
    log_pi_NV = log_pi_BTV.flatten(0, 1)[indices_N - 1]
    targets_N = token_ids_BT.flatten()[indices_N]
    expected_N = log_pi_NV.gather(1, targets_N[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs_N, expected_N, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_models_configuration_is_not_applied(tmp_path: Path, ranks: Ranks) -> None:
    save_random_model(tmp_path, "granite", attention_dropout=0.9)
    settings = Settings(run=RunSettings(model=str(tmp_path), environment="calculator"))
    policy = load_policy(settings, ranks)
    sequences, indices_N = Sequences.from_token_ids([range(3, 15)]), torch.arange(1, 12)

    one, other = (policy(sequences, indices_N).logprobs_N for _ in range(2))

    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_engine_needs_the_eager_implementation_for_a_cap_of_the_attentions_logits(
    tmp_path: Path,
) -> None:
    save_random_model(tmp_path, "gemma2")

    assert attention_of(AutoConfig.from_pretrained(tmp_path).to_dict()) == "eager"
    assert attention_of({"model_type": "qwen3"}) == "sdpa"


def test_factor_and_cap_are_applied_in_this_order() -> None:
    change = LogitChange.from_config(
        {"model_type": "granite", "logits_scaling": 4.0, "final_logit_softcapping": 2.0}
    )

    prepared = Softmax(change, temperature=0.5).prepare(torch.tensor([8.0]))

    torch.testing.assert_close(prepared, torch.tensor([2.0]).div(2).tanh() * 2 / 0.5)
    assert LogitChange.from_config({"model_type": "qwen3", "logits_scaling": 4.0}) == LogitChange()


def test_a_change_that_is_not_known_is_refused_when_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(tmp_path, "granite")
    monkeypatch.setattr("configs.architecture.FACTORS", {})

    with pytest.raises(SettingsError, match="got GraniteForCausalLM, whose logits differ"):
        load_causal_lm(tmp_path)
