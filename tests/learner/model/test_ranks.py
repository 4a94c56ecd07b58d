"""Two ranks and four over gloo against one: the same loss, gradient, weights and checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.weights.probe import LogprobDifference
from configs.errors import SettingsError
from configs.settings import LearnerSettings
from learner.checkpointing.bucket_copies import COMMITTED
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.tensors import PREFIX
from learner.model.policy import probe_logprobs, rounded_logprobs, shard
from learner.model.ranks import Ranks, join
from learner.training.optimizer import ScheduledOptimizer
from tests.configs.support.fake_smi import install_smi
from tests.learner.support.adapted_policy import (
    PACKED,
    SETTINGS,
    adapted_policy,
    published_bytes,
)
from tests.learner.support.random_models import FAMILIES, OFFSETS_LOST, save_in_files
from tests.learner.support.ranks.layouts import CASES, FOUR_AND_TWO, WIDE, Case, tensors_of
from tests.learner.support.ranks.layouts import STATE as SAVED
from tests.learner.support.ranks.layouts import new_policy as wide_policy
from tests.learner.support.ranks.one_of_two_ranks import (
    PROBE,
    new_policy,
    train,
    train_adapters,
    train_critics,
    train_with_muon,
    whole_moments,
    whole_parameters,
)
from tests.learner.support.ranks.several_ranks import run_ranks
from tests.learner.support.ranks.wrong_exchanges import WRONG
from tests.learner.support.tiny_policy import constant_rate, tiny_causal_lm

EXACT = 1e-10
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks, then two and four in all layouts, have left what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_causal_lm(seed=0).save_pretrained(folder / "model")
    for number, family in enumerate(FAMILIES):
        saved = folder / "saved" / family
        save_in_files(saved, family, tied=number % 2 == 0, small_files=number > 1)
    run_ranks(folder, ("one_of_two_ranks", 2), *(("layouts", ranks) for ranks in CASES))
    return folder


def _of_two(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"found-{rank}.json").read_text())
    return found


def test_two_ranks_train_as_one_does(found: Path, ranks: Ranks) -> None:
    policy, optimizer = new_policy(ranks)

    batches = [asdict(train(policy, optimizer, step, ranks)) for step in (1, 2, 3)]

    for ours, theirs in zip(batches, _of_two(found)["batches"], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
        assert theirs["outcome"] == pytest.approx(ours["outcome"], abs=1e-5)
        # A ratio that rounds differently may fall into the next bin.
        percentiles = (b["divergence"].pop("ratio_percentiles") for b in (ours, theirs))
        assert next(percentiles) == pytest.approx(next(percentiles), rel=0.1)
        histograms = [b["divergence"].pop("log_ratio_histogram") for b in (ours, theirs)]
        assert len({sum(counted.values()) for counted in histograms}) == 1
        assert theirs["divergence"] == pytest.approx(ours["divergence"], abs=1e-4)
    gathered = torch.load(found / "parameters.pt")
    for ours_, theirs_ in zip(whole_parameters(policy), gathered, strict=True):
        assert torch.allclose(ours_, theirs_, atol=1e-5)


def test_two_ranks_read_what_transformers_loads(found: Path) -> None:
    differences = _of_two(found)["differences"]

    wrong = differences.pop(OFFSETS_LOST)
    assert differences == {name: [] for name in (*FAMILIES, "(2, 1)", "(1, 2)")}
    assert "model.embed_tokens.weight" in wrong, "what a rank reads from a wrong place is found"


def test_two_ranks_step_with_muon_as_one_does(found: Path, ranks: Ranks) -> None:
    initial = whole_parameters(new_policy(ranks)[0])

    alone = train_with_muon(ranks)

    # It computes in bfloat16. Shards that were made orthogonal apart would differ by half a step.
    theirs = torch.load(found / "muon.pt")
    for before, ours, other in zip(initial, alone, theirs, strict=True):
        assert (ours - other).norm() < 0.2 * (ours - before).norm()


@pytest.mark.parametrize(("name", "settings"), [("adapted", SETTINGS), ("packed", PACKED)])
def test_two_ranks_train_adapters_as_one_does(
    found: Path, ranks: Ranks, name: str, settings: LearnerSettings
) -> None:
    alone, wire = train_adapters(ranks, settings)
    policy, _ = adapted_policy(ranks, settings=settings)
    untrained = published_bytes(policy.causal_lm)

    for theirs, their_wire in torch.load(found / f"{name}.pt"):
        for ours, other in zip(alone, theirs, strict=True):
            assert torch.allclose(ours, other, atol=1e-5)
        ours_, theirs_, before = (
            torch.frombuffer(bytearray(each), dtype=torch.float32)
            for each in (wire, their_wire, untrained)
        )
        assert torch.allclose(ours_, theirs_, atol=1e-5)
        assert (ours_ - before).abs().max() > 1e-4


def test_one_rank_loads_the_codes_of_two(found: Path, ranks: Ranks) -> None:
    policy, optimizer = new_policy(ranks, settings=LearnerSettings(optimizer="adamw8bit"))
    checkpoints = Checkpoints(found / "8-bits", keep=1, ranks=ranks)
    newest = checkpoints.newest()
    assert newest is not None

    checkpoints.load(newest[0], policy, optimizer)

    theirs = torch.load(found / "8-bits.pt")
    assert {moment.dtype for moment in theirs} == {torch.uint8, torch.float32}
    for ours, other in zip(whole_moments(optimizer), theirs, strict=True):
        assert torch.equal(ours, other)


def test_two_ranks_that_share_microbatches_train_as_one_does(
    found: Path, tmp_path: Path, ranks: Ranks
) -> None:
    policy, optimizer = new_policy(ranks)
    batches = [asdict(train(policy, optimizer, step, ranks)) for step in (1, 2)]
    figures, _ = train_critics(tmp_path, ranks, steps=(1,))

    for ours, theirs in zip(batches, _of_two(found)["sharing"], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
        assert theirs["outcome"] == pytest.approx(ours["outcome"], abs=1e-5)
        for key in ("ratio_percentiles", "log_ratio_histogram"):
            del ours["divergence"][key], theirs["divergence"][key]
        assert theirs["divergence"] == pytest.approx(ours["divergence"], abs=1e-4)
    for ours, theirs in zip(figures, _of_two(found)["sharing_values"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)


def test_ranks_agree_to_the_bit_on_what_guards_decide_by(found: Path) -> None:
    assert _of_two(found, rank=1) == _of_two(found, rank=0)


def test_two_ranks_go_back_to_a_checkpoint_and_to_the_beginning(found: Path, ranks: Ranks) -> None:
    policy, optimizer = new_policy(ranks)
    initial = [parameter.clone() for parameter in whole_parameters(policy)]
    for step in (1, 2):
        train(policy, optimizer, step, ranks)

    restored, begun_anew = torch.load(found / "older.pt")

    assert _of_two(found)["back_to"] == [2, 0]
    for ours, theirs in zip(whole_parameters(policy), restored, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(initial, begun_anew, strict=True))


def test_one_rank_resumes_the_checkpoint_of_two(found: Path, ranks: Ranks) -> None:
    policy, optimizer = new_policy(ranks, seed=9)
    checkpoints = Checkpoints(found / "checkpoints", keep=1, ranks=ranks)
    newest = checkpoints.newest()
    assert newest is not None

    checkpoints.load(newest[0], policy, optimizer)
    own, theirs = probe_logprobs(policy, PROBE), _of_two(found)
    assert own == pytest.approx(theirs["probe"], abs=1e-5)
    rounded = rounded_logprobs(policy, PROBE, dtype=torch.bfloat16)
    assert rounded == pytest.approx(theirs["rounded"], abs=1e-5)
    moved = LogprobDifference.from_logprobs(rounded, own).mean
    # Ranks that share tokens draw other numbers, for a policy that has been trained alike.
    assert (
        moved / 4 < LogprobDifference.from_logprobs(theirs["rounded_apart"], own).mean < 4 * moved
    )
    train(policy, optimizer, 3, ranks)

    gathered = torch.load(found / "parameters.pt")
    for ours, theirs in zip(whole_parameters(policy), gathered, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_two_ranks_copy_a_checkpoint_file_by_file(found: Path) -> None:
    [copy] = (found / "bucket" / "tiny" / "checkpoints").iterdir()
    [checkpoint] = (found / "checkpoints").glob("step-*")
    contents = {file.name: file.read_bytes() for file in copy.iterdir()}

    assert copy.name == checkpoint.name
    assert contents.pop(COMMITTED)
    assert contents == {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def test_two_ranks_train_a_critic_as_one_does(found: Path, tmp_path: Path, ranks: Ranks) -> None:
    figures, moments = train_critics(tmp_path, ranks)

    for ours, theirs in zip(figures, _of_two(found)["values"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)
    for ours_, theirs_ in zip(moments, torch.load(found / "critics.pt"), strict=True):
        assert torch.allclose(ours_, theirs_, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"learner\.device must be cpu or auto"):
        join("cuda", threads=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_does_not_see_is_never_left_out_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    install_smi(monkeypatch, tmp_path, driver="535.104.05")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    with pytest.raises(
        SettingsError, match=r"device must be cpu .* needs driver 580 or newer, got 5"
    ):
        join(device, threads=1)


def _errors(folder: Path, ranks: int) -> dict[str, Any]:
    errors: dict[str, Any] = json.loads((folder / f"found-{ranks}.json").read_text())
    return errors


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n, of in CASES.items() for name in of])
def test_loss_and_every_gradient_are_those_of_one_rank(ranks: int, name: str, found: Path) -> None:
    assert _errors(found, ranks)[name] <= EXACT


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str, found: Path) -> None:
    ranks, right, _ = WRONG[name]
    assert _errors(found, ranks)[right] <= EXACT < 1e-3 < _errors(found, ranks)[name]


@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize("layout", ["shards", "copies", "parts"])
def test_a_checkpoint_moves_between_layouts_to_the_bit(
    layout: str, size: int, found: Path, ranks: Ranks
) -> None:
    assert _errors(found, size)["moved"] == []
    policy = shard(wide_policy(Case("qwen3", {}, FOUR_AND_TWO)), ranks.mesh, dtype=WIDE)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    checkpoints = Checkpoints(found / f"{layout}-{size}", keep=1, ranks=ranks)
    path = checkpoints.path_of(SAVED.step)

    checkpoints.load(path, policy, optimizer)

    expected = torch.load(found / f"expected-{size}.pt")
    for ours, theirs in zip(tensors_of(policy, optimizer), expected, strict=True):
        assert torch.equal(ours, theirs)
    stored = sum(file.stat().st_size for file in path.glob(f"{PREFIX}*"))
    needed = sum(tensor.numel() * tensor.element_size() for tensor in expected)
    assert stored < 1.2 * needed, "one copy writes"
