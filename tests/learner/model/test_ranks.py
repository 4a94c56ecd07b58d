"""Two ranks over gloo against one: the same loss, gradient, weights and checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import SettingsError
from learner.checkpointing.checkpoint import Checkpoints
from learner.model.policy import probe_logprobs
from learner.model.ranks import Ranks, join
from tests.learner.support.one_of_two_ranks import (
    PROBE,
    new_policy,
    train,
    train_critics,
    whole_parameters,
)
from tests.learner.support.tiny_policy import tiny_causal_lm
from tests.learner.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they found."""
    folder = tmp_path_factory.mktemp("two-ranks")
    tiny_causal_lm(seed=0).save_pretrained(folder / "model")
    run_two_ranks("tests.learner.support.one_of_two_ranks", folder)
    return folder


def _found(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"found-{rank}.json").read_text())
    return found


def test_two_ranks_train_as_one_does(two_ranks: Path, ranks: Ranks) -> None:
    policy, optimizer = new_policy(ranks)

    batches = [asdict(train(policy, optimizer, step, ranks)) for step in (1, 2, 3)]

    for ours, theirs in zip(batches, _found(two_ranks)["batches"], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
        assert theirs["outcome"] == pytest.approx(ours["outcome"], abs=1e-5)
        # A ratio that rounds differently may fall into the next bin.
        percentiles = (b["divergence"].pop("ratio_percentiles") for b in (ours, theirs))
        assert next(percentiles) == pytest.approx(next(percentiles), rel=0.1)
        assert theirs["divergence"] == pytest.approx(ours["divergence"], abs=1e-4)
    gathered = torch.load(two_ranks / "parameters.pt")
    for ours_, theirs_ in zip(whole_parameters(policy), gathered, strict=True):
        assert torch.allclose(ours_, theirs_, atol=1e-5)


def test_ranks_agree_to_the_bit_on_what_guards_decide_by(two_ranks: Path) -> None:
    assert _found(two_ranks, rank=1) == _found(two_ranks, rank=0)


def test_two_ranks_go_back_to_a_checkpoint_and_to_the_beginning(
    two_ranks: Path, ranks: Ranks
) -> None:
    policy, optimizer = new_policy(ranks)
    initial = [parameter.clone() for parameter in whole_parameters(policy)]
    for step in (1, 2):
        train(policy, optimizer, step, ranks)

    restored, begun_anew = torch.load(two_ranks / "older.pt")

    assert _found(two_ranks)["back_to"] == [2, 0]
    for ours, theirs in zip(whole_parameters(policy), restored, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(initial, begun_anew, strict=True))


def test_one_rank_resumes_the_checkpoint_of_two(two_ranks: Path, ranks: Ranks) -> None:
    policy, optimizer = new_policy(ranks, seed=9)
    checkpoints = Checkpoints(two_ranks / "checkpoints", keep=1, ranks=ranks)
    newest = checkpoints.newest()
    assert newest is not None

    checkpoints.load(newest[0], policy, optimizer)
    assert probe_logprobs(policy, PROBE) == pytest.approx(_found(two_ranks)["probe"], abs=1e-5)
    train(policy, optimizer, 3, ranks)

    gathered = torch.load(two_ranks / "parameters.pt")
    for ours, theirs in zip(whole_parameters(policy), gathered, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_two_ranks_train_a_critic_as_one_does(
    two_ranks: Path, tmp_path: Path, ranks: Ranks
) -> None:
    figures, moments = train_critics(tmp_path, ranks)

    for ours, theirs in zip(figures, _found(two_ranks)["values"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)
    for ours_, theirs_ in zip(moments, torch.load(two_ranks / "critics.pt"), strict=True):
        assert torch.allclose(ours_, theirs_, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"learner\.device must be cpu or auto"):
        join("cuda", threads=1)
