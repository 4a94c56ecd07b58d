"""Ranks that divide matrices: critics, weights that are read and published, models refused.

`test_ranks.py` compares loss and gradients, and checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.weights.probe import LogprobDifference
from configs.errors import SettingsError
from learner.model.ranks import Ranks
from learner.model.tensor_parallel import TensorGroup, divide_tensors
from tests.learner.support.random_models import make_random_model, save_in_files
from tests.learner.support.ranks.divided import train_critics
from tests.learner.support.ranks.several_ranks import run_ranks

READ = {"qwen3": True, "llama": False, "gemma3_text": True}
"""Family of a model -> whether its embeddings are tied."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks have found."""
    folder = tmp_path_factory.mktemp("divided")
    for family, tied in READ.items():
        sizes = {"num_key_value_heads": 2}
        save_in_files(folder / "saved" / family, family, tied=tied, small_files=tied, **sizes)
    run_ranks(folder, ("divided", 2))
    return [torch.load(folder / f"found-{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
def test_policies_with_critics_are_trained_as_by_one_rank(
    found: list[dict[str, Any]], tmp_path: Path, ranks: Ranks
) -> None:
    alone = train_critics(tmp_path, ranks)

    for ours, theirs in zip(alone["figures"], found[0]["figures"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)
    for name in ("parameters", "published"):
        for mine, other in zip(alone[name], found[0][name], strict=True):
            assert torch.allclose(mine, other, atol=2e-5)
    assert found[0]["probes"] == pytest.approx(alone["probes"], abs=1e-4)
    assert found[0]["drawn"] == alone["drawn"]
    moved = [
        LogprobDifference.from_logprobs(each["rounded"], each["probes"]).mean
        for each in (alone, found[0])
    ]
    assert moved[0] / 2 < moved[1] < 2 * moved[0], "each rank draws for its part"
    assert {token < 10 for token in alone["drawn"]} == {True, False}, "of both parts"


@pytest.mark.slow
def test_both_ranks_decide_by_the_same_bits(found: list[dict[str, Any]]) -> None:
    first, second = found

    assert first["figures"] == second["figures"]
    assert first["probes"] == second["probes"]
    assert first["rounded"] == second["rounded"]
    assert all(map(torch.equal, first["published"], second["published"]))


@pytest.mark.slow
def test_each_rank_reads_its_part_of_what_transformers_loads(found: list[dict[str, Any]]) -> None:
    assert found[0]["differences"] == {family: [] for family in READ}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "phi3",
            {},
            r"got 1 \(colwise_gather_output, rowwise_split_input\); set .*parallel\.shard",
        ),
        ("olmo2", {}, r"\(colwise_gather_output, rowwise_split_input\)"),
        ("cohere", {"use_qk_norm": True}, r"\(layers\.0\.self_attn\.\w_norm is not in it\)"),
    ],
)
def test_models_without_a_plan_for_heads_are_refused(
    family: str, changes: dict[str, Any], reason: str, ranks: Ranks
) -> None:
    model = make_random_model(family, **changes).base_model

    with pytest.raises(SettingsError, match=rf"parallel\.tensor must be 1 for .*{reason}"):
        divide_tensors(model, TensorGroup(mesh=ranks.mesh))


def test_a_model_that_has_no_plan_is_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_random_model("llama")
    monkeypatch.setattr(type(model.config), "base_model_tp_plan", None)

    with pytest.raises(SettingsError, match=r"parallel\.tensor must be 1 .* \(no plan\)"):
        divide_tensors(model, TensorGroup(mesh=ranks.mesh))
