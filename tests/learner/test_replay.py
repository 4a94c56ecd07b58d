"""Replay of kept batches: the same to the last bit, with another loss, or refused."""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from typer.testing import CliRunner

from configs import durable
from configs.errors import CheckpointError, RecordError
from configs.settings import Settings
from console.main import app
from console.run.plan import keep_settings
from console.run.run_folder import RunFolder
from console.verbs.replay import compared
from learner.checkpointing.folders import complete_checkpoints, lend
from learner.checkpointing.manifest import KEY
from learner.checkpointing.tensors import Shards
from learner.data.kept_batches import FOLDER, kept_steps, read_kept
from learner.data.records import Records
from learner.model.ranks import Ranks
from learner.replay import replay_on
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings

REUSE = {"capacity": 64, "fraction": 0.5, "max_reuse": 2, "max_lag": 6}


def _settings(folder: Path, **tables: Any) -> Settings:
    return tiny_settings(
        folder,
        **{
            "run": {"steps": 6},
            "learner": {"lr": 1e-2, "keep_batches": 6, "keep_checkpoints": 6},
            **tables,
        },
    )


def _again(settings: Settings, name: str = "again") -> Settings:
    """Settings of a replay of a run, in a folder of its own."""
    changes = {"name": name, "model": settings.run.model_path}
    return settings.model_copy(update={"run": settings.run.model_copy(update=changes)})


def _replay(settings: Settings, of: Settings, ranks: Ranks, *, last: int = 6) -> dict[str, Any]:
    """Replay up to a batch; the figures that differ, by name."""
    assert replay_on(ranks, settings, of.run.folder, last, threading.Event())
    result = compared(RunFolder(of.run.folder), RunFolder(settings.run.folder))
    return {row["figure"]: row for row in result.rows}


def _tensors(settings: Settings, step: int) -> Iterator[torch.Tensor]:
    shards = Shards(settings.run.folder / "checkpoints" / f"step-{step:06d}")
    for name in sorted(shards.shapes):
        yield shards.read_whole(name)


@pytest.mark.parametrize("tables", [{}, {"replay": REUSE}], ids=["plain", "reused groups"])
def test_a_replay_is_the_same_to_the_last_bit(
    tables: dict[str, Any], redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path, **tables)
    assert RingInProcess(settings, redis_url, ranks).live()
    anew, later = _again(settings, "anew"), _again(settings, "later")
    later.run.folder.mkdir()
    lend(settings.run.folder / "checkpoints" / "step-000002", later.run.folder)

    for replayed, steps in ((anew, range(1, 7)), (later, range(3, 7))):
        assert _replay(replayed, settings, ranks) == {}

        lines = (replayed.run.folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(steps)
        assert all(json.loads(line)["grad_norm"] > 0 for line in lines)
        pairs = zip(_tensors(replayed, 6), _tensors(settings, 6), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_another_loss_meets_the_same_data(redis_url: str, tmp_path: Path, ranks: Ranks) -> None:
    settings = _settings(tmp_path)
    assert RingInProcess(settings, redis_url, ranks).live()
    other = settings.algorithm.model_copy(update={"surrogate": "cispo", "entropy_bonus": 0.1})

    differing = _replay(_again(settings).model_copy(update={"algorithm": other}), settings, ranks)

    assert differing["grad_norm"]["first"] == 1
    assert differing["entropy_bonus"]["at most"] == pytest.approx(0.1)
    assert differing.keys().isdisjoint({"reward_mean", "trained_tokens", "policy_lag_histogram"})


def test_rewards_are_shaped_by_the_settings_of_the_replay(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path)
    assert RingInProcess(settings, redis_url, ranks).live()
    halved = settings.rewards.model_copy(update={"weights": {"exact": 0.5}})

    differing = _replay(_again(settings).model_copy(update={"rewards": halved}), settings, ranks)

    line = differing["reward_mean"]
    assert line["replay"] == line["run"] / 2


def test_the_newest_batches_are_kept_and_those_of_an_abandoned_branch_are_not(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path, learner={"lr": 1e-2, "keep_batches": 3, "checkpoint_every": 2})
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 3
    with pytest.raises(LifeEnded):
        ring.live()
    folder = settings.run.folder
    assert 3 in kept_steps(folder)
    (folder / FOLDER / "000099.msgpack").write_bytes(b"of a branch that is gone")

    assert ring.live()

    assert kept_steps(folder) == [4, 5, 6]
    assert len(read_kept(folder, 6).records) == 8


def test_a_batch_that_is_not_kept_or_damaged_is_refused(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path)
    assert RingInProcess(settings, redis_url, ranks).live()
    file = settings.run.folder / FOLDER / "000002.msgpack"
    file.write_bytes(file.read_bytes()[:-9])

    with pytest.raises(RecordError, match=r"000002.msgpack must be a batch that .* replay other"):
        _replay(_again(settings), settings, ranks)
    with pytest.raises(RecordError, match=r"000007.msgpack must be a batch"):
        read_kept(settings.run.folder, 7)


def test_a_checkpoint_that_the_run_did_not_write_is_not_lent(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path, run={"steps": 2})
    assert RingInProcess(settings, redis_url, ranks).live()
    [checkpoint] = complete_checkpoints(settings.run.folder / "checkpoints")
    (settings.run.folder / KEY).unlink()

    with pytest.raises(CheckpointError, match="must have been written by this run"):
        lend(checkpoint, tmp_path / "other")


def test_a_batch_that_cannot_be_kept_is_trained_all_the_same(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path)
    write, encoded = durable.replace_file, Records.encoded

    def full(path: Path, content: bytes, **mode: int) -> None:
        if path.name == "000003.msgpack":
            raise OSError(errno.ENOSPC, "the disk is full")
        write(path, content, **mode)

    def lost(records: Records, task_ids: Sequence[int]) -> list[bytes]:
        if kept_steps(settings.run.folder)[-1:] == [4]:
            raise RecordError("the record of a task must be in the store, got none")
        return encoded(records, task_ids)

    monkeypatch.setattr(durable, "replace_file", full)
    monkeypatch.setattr(Records, "encoded", lost)

    with capture_logs() as lines:
        assert RingInProcess(settings, redis_url, ranks).live()

    assert kept_steps(settings.run.folder) == [1, 2, 4]
    reasons = {line["step"]: line["reason"] for line in lines if line["event"] == "BATCH NOT KEPT"}
    assert "disk is full" in reasons[3]
    assert "must be in the store" in reasons[5]


# --------------------------------------------------------------------------------------------------
# The verb.


def _nyala(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_the_verb_trains_in_a_process_of_its_own_and_compares(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path)
    assert RingInProcess(settings, redis_url, ranks).live()
    keep_settings(settings)
    folder = settings.run.folder

    result = _nyala(folder, "--batches", "4:5", "--name", "one")

    assert result.exit_code == 0, result.output
    assert "3 batches in" in result.output  # from the checkpoint after batch 2 on
    assert "figures are equal" in " ".join(result.output.split())
    again = _nyala(folder, "--batches", "4", "--name", "one")
    assert again.exit_code == 2
    assert "--name must be the name of a new run, got one, which has a folder" in again.output


@pytest.mark.parametrize(
    ("batches", "answer"),
    [
        ("6:8", "got 1, 3 to 6 in .*checkpoints after batches 2, 4, 6; choose batches"),
        ("2", "from the checkpoint before them on, from 1 to 2, got 1, 3 to 6"),
        ("5:3", "--batches must be the first and the last batch, such as 100:120, got 5:3"),
        ("0:3", "--batches must be the first and the last batch"),
        ("a:b", "--batches must be the first and the last batch"),
    ],
)
def test_batches_that_cannot_be_replayed_are_refused_with_those_that_can(
    batches: str, answer: str, tmp_path: Path
) -> None:
    settings = _settings(tmp_path)
    keep_settings(settings)
    for step in (1, 3, 4, 5, 6):
        file = settings.run.folder / FOLDER / f"{step:06d}.msgpack"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
    for step in (2, 4, 6):
        (settings.run.folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)

    result = _nyala(settings.run.folder, "--batches", batches)

    assert result.exit_code == 2
    assert re.search(answer, result.output)
    assert not settings.run.folder.with_name("tiny-replay").exists()
