"""Checkpoints: what is loaded is what was saved, or nothing is."""

from __future__ import annotations

import json
import re
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs import durable
from configs.errors import CheckpointError, LostLineage
from configs.settings import AlgorithmSettings, LearnerSettings
from learner.checkpointing import checkpoint as checkpoint_module
from learner.checkpointing import verification
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.folders import STATE as STATE_FILE
from learner.checkpointing.folders import write_lineages
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.manifest import MANIFEST, encode_manifest, read_manifest, run_key
from learner.checkpointing.verification import verify
from learner.data.batch import pack, plan_batch
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.reporting.metrics import Totals
from learner.training.guards import GuardState
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import train_batch
from tests.learner.support.made_critic import HEAD, make_pair
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.tiny_policy import (
    constant_rate,
    parameters_of,
    tiny_causal_lm,
    tiny_policy,
)

SETTINGS = AlgorithmSettings(entropy_bonus=0.01)
STATE = LearnerState(
    run="tiny",
    settings_hash="h",
    step=2,
    lineage=1,
    cursor=9,
    trained=((0, 3), (5, 9)),
    totals=Totals(episodes=5, wall_s=2.5),
    guards=GuardState(rollbacks=1, kl_lr_scale=0.3, kl_coefficient=0.1 / 3),
)


def _new(ranks: Ranks, *, seed: int = 0) -> tuple[Policy, ScheduledOptimizer]:
    policy = tiny_policy(ranks.mesh, seed=seed)
    return policy, ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())


def _train(policy: Policy, optimizer: ScheduledOptimizer, steps: range, ranks: Ranks) -> None:
    for step in steps:
        episodes = random_group_episodes(4, 4, seed=step)
        plan = plan_batch(
            step,
            episodes,
            ranks=1,
            settings=SETTINGS,
            max_completion_tokens=8,
            microbatch_tokens=16384,
        )
        microbatches = pack(
            plan,
            episodes,
            settings=SETTINGS,
            lineages={1: 0},
            lineage=1,
        )
        train_batch(policy, optimizer, step, microbatches, settings=SETTINGS, ranks=ranks)


def _saved(
    folder: Path, ranks: Ranks, *, keep: int = 3, steps: tuple[int, ...] = (2,)
) -> Checkpoints:
    policy, optimizer = _new(ranks)
    _train(policy, optimizer, range(1, 2), ranks)
    checkpoints = Checkpoints(folder, keep=keep, ranks=ranks)
    for step in steps:
        checkpoints.save(replace(STATE, step=step), policy, optimizer)
    return checkpoints


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, ranks: Ranks
) -> None:
    policy, optimizer = _new(ranks)
    _train(policy, optimizer, range(1, 3), ranks)
    checkpoints = Checkpoints(tmp_path, keep=3, ranks=ranks)
    path = checkpoints.save(STATE, policy, optimizer)
    random_then = torch.rand(3)
    _train(policy, optimizer, range(3, 6), ranks)

    resumed, resumed_optimizer = _new(ranks, seed=7)
    checkpoints.load(path, resumed, resumed_optimizer)
    random_now = torch.rand(3)
    _train(resumed, resumed_optimizer, range(3, 6), ranks)

    assert torch.equal(random_now, random_then)
    expected = parameters_of(policy, optimizer)
    ours = parameters_of(resumed, resumed_optimizer)
    assert len(ours) == len(expected) > 50
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_checkpoint_carries_the_learners_state(tmp_path: Path, ranks: Ranks) -> None:
    newest = _saved(tmp_path, ranks).newest()

    assert newest == (tmp_path / "step-000002", STATE)


def test_no_checkpoint_is_not_an_error(tmp_path: Path, ranks: Ranks) -> None:
    assert Checkpoints(tmp_path / "none", keep=1, ranks=ranks).newest() is None


def test_only_what_lacks_a_critic_is_refused_for_it(tmp_path: Path, ranks: Ranks) -> None:
    pair, again = make_pair(HEAD, tmp_path, ranks), make_pair(HEAD, tmp_path, ranks, seed=7)
    with_critic = Checkpoints(tmp_path / "with", keep=1, ranks=ranks, critic=pair.critic)
    path = with_critic.save(STATE, pair.policy, pair.optimizer)
    without = Checkpoints(tmp_path / "without", keep=1, ranks=ranks)
    bare = without.save(STATE, pair.policy, pair.optimizer)

    Checkpoints(tmp_path, keep=1, ranks=ranks, critic=again.critic).load(
        path, again.policy, again.optimizer
    )
    assert all(map(torch.equal, again.parameters(), pair.parameters()))
    without.load(path, again.policy, again.optimizer)  # a run may leave its critic behind
    with pytest.raises(CheckpointError, match=r"must hold a critic of .* head, got none"):
        with_critic.load(bare, pair.policy, pair.optimizer)

    deeper = Policy(tiny_causal_lm(layers=3), temperature=1.0)
    optimizer = ScheduledOptimizer(deeper, constant_rate(1e-2), LearnerSettings())
    for checkpoints in (with_critic, without):
        with pytest.raises(CheckpointError, match=r"layers\.2\..* it is of another model"):
            checkpoints.load(path, deeper, optimizer)


def test_a_flipped_bit_in_any_file_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    _saved(tmp_path, ranks)
    folder = tmp_path / "step-000002"
    files = [file for file in folder.iterdir() if file.name != MANIFEST]
    assert len(files) == 3

    for file in files:
        intact = file.read_bytes()
        for place in (0, len(intact) // 2, len(intact) - 1):
            flipped = bytearray(intact)
            flipped[place] ^= 1
            file.write_bytes(flipped)
            with pytest.raises(
                CheckpointError, match=f"{re.escape(file.name)} must have the digest"
            ):
                verify(folder)
        file.write_bytes(intact)
    assert verify(folder) == STATE


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    _saved(tmp_path, ranks)
    folder = tmp_path / "step-000002"

    for file in list(folder.iterdir()):
        intact = file.read_bytes()
        file.write_bytes(intact[:-1])
        with pytest.raises(CheckpointError):
            verify(folder)
        file.unlink()
        with pytest.raises(CheckpointError):
            verify(folder)
        file.write_bytes(intact)
    assert verify(folder) == STATE


def test_a_corrupt_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, ranks: Ranks
) -> None:
    checkpoints = _saved(tmp_path, ranks, steps=(2, 4))
    (tmp_path / "step-000004" / "state.json").write_text("{}")

    newest = checkpoints.newest()

    assert newest is not None
    assert newest[1].step == 2


def test_only_corrupt_checkpoints_end_the_learner(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = _saved(tmp_path, ranks)
    (tmp_path / "step-000002" / "state.json").write_text("{}")

    with pytest.raises(CheckpointError, match=r"at least one checkpoint in .* must be intact"):
        checkpoints.newest()
    with pytest.raises(CheckpointError):  # the next life too: it must not begin the run anew
        checkpoints.newest()


class _SlowDisk(durable.Disk):
    def sync(self, path: Path) -> None:
        time.sleep(0.05)
        super().sync(path)


def test_what_is_still_being_written_is_waited_for(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = _new(ranks)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3, ranks=ranks)
    monkeypatch.setattr(durable, "DISK", _SlowDisk())

    checkpoints.begin_save(STATE, policy, optimizer, then=list)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[1].step == 2

    checkpoints.begin_save(replace(STATE, step=3), policy, optimizer, then=list)
    checkpoints.save(replace(STATE, step=4), policy, optimizer)
    assert [path.name for path in checkpoints.all()] == [f"step-00000{step}" for step in (2, 3, 4)]


def test_old_and_unfinished_checkpoints_are_removed(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / ".unfinished-step-000099").mkdir(parents=True)

    _saved(tmp_path, ranks, keep=2, steps=(2, 4, 6))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000006"]


def test_fewer_checkpoints_than_are_kept_all_stay(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = _saved(tmp_path, ranks, keep=5, steps=(2, 4, 6))

    assert [path.name for path in checkpoints.all()] == [
        "step-000002",
        "step-000004",
        "step-000006",
    ]


def test_a_refused_checkpoint_does_not_push_out_a_good_one(tmp_path: Path, ranks: Ranks) -> None:
    policy, optimizer = _new(ranks)
    _train(policy, optimizer, range(1, 2), ranks)
    checkpoints = Checkpoints(tmp_path, keep=2, ranks=ranks)
    for step in (2, 4, 6):
        checkpoints.save(replace(STATE, step=step), policy, optimizer)
    (tmp_path / "step-000006" / "state.json").write_text("{}")
    assert checkpoints.newest() == (tmp_path / "step-000004", replace(STATE, step=4))

    checkpoints.save(replace(STATE, step=5), policy, optimizer)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "refused-step-000006",
        "step-000004",
        "step-000005",
    ]
    assert checkpoints.newest() == (tmp_path / "step-000005", replace(STATE, step=5))


def test_the_checkpoint_just_saved_is_never_removed(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = _saved(tmp_path, ranks, keep=1, steps=(8, 4))  # as after a resume at an older one

    assert (tmp_path / "step-000004").is_dir()
    assert verify(tmp_path / "step-000004").step == 4
    assert checkpoints.all() == [tmp_path / "step-000004"]


def test_checkpoints_are_ordered_by_number(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = _saved(tmp_path, ranks, keep=2, steps=(999_998, 1_000_000))

    newest = checkpoints.newest()

    assert newest is not None
    assert newest[1].step == 1_000_000
    assert [path.name for path in checkpoints.all()] == ["step-999998", "step-1000000"]


def test_a_step_trained_again_replaces_its_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    policy, optimizer = _new(ranks)
    _train(policy, optimizer, range(1, 2), ranks)
    checkpoints = Checkpoints(tmp_path, keep=2, ranks=ranks)
    checkpoints.save(STATE, policy, optimizer)

    checkpoints.save(replace(STATE, lineage=2), policy, optimizer)

    newest = checkpoints.newest()
    assert newest is not None
    assert newest[1].lineage == 2


def _copied_into_another_run(tmp_path: Path, ranks: Ranks) -> Checkpoints:
    _saved(tmp_path / "theirs" / "checkpoints", ranks)
    shutil.copytree(tmp_path / "theirs" / "checkpoints", tmp_path / "ours" / "checkpoints")
    return Checkpoints(tmp_path / "ours" / "checkpoints", keep=2, ranks=ranks)


def test_another_runs_checkpoint_is_refused_before_any_of_its_files_is_read(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = _copied_into_another_run(tmp_path, ranks)
    read: list[Path] = []
    monkeypatch.setattr(checkpoint_module, "verify", read.append)

    with pytest.raises(CheckpointError, match=r"another MAC.*--trust-checkpoint step-000002"):
        checkpoints.newest()

    assert not read
    assert [path.name for path in checkpoints.all()] == ["step-000002"]  # it stays where it was


def test_a_manifest_without_a_mac_or_with_a_forged_one_is_refused(
    tmp_path: Path, ranks: Ranks
) -> None:
    checkpoints = _saved(tmp_path / "checkpoints", ranks)
    file = tmp_path / "checkpoints" / "step-000002" / MANIFEST
    manifest = json.loads(file.read_text())
    forged = dict(manifest["blake3"], **{"tensors-1.safetensors": "0" * 64})

    for changed in (
        {"blake3": manifest["blake3"]},
        {"blake3": forged, "mac": manifest["mac"]},
        {"blake3": manifest["blake3"], "mac": "é"},
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match="must have been written by this run"):
            checkpoints.newest()

    file.write_text(json.dumps(manifest))
    assert checkpoints.newest() is not None


def test_a_manifest_that_leaves_the_learners_state_out_is_refused(
    tmp_path: Path, ranks: Ranks
) -> None:
    checkpoints = _saved(tmp_path / "checkpoints", ranks)
    path = tmp_path / "checkpoints" / "step-000002"
    digests = dict(read_manifest(path).digests)
    del digests[STATE_FILE]
    (path / MANIFEST).write_bytes(encode_manifest(digests, run_key(tmp_path)))
    (path / STATE_FILE).unlink()

    with pytest.raises(CheckpointError, match=f"must list {STATE_FILE}"):
        checkpoints.newest()


def test_another_runs_newer_checkpoint_is_passed_over_and_stays_where_it_can_be_trusted(
    tmp_path: Path, ranks: Ranks
) -> None:
    _saved(tmp_path / "theirs" / "checkpoints", ranks, steps=(9,))
    ours = _saved(tmp_path / "ours" / "checkpoints", ranks, keep=2, steps=(2, 4))
    folder = tmp_path / "ours" / "checkpoints"
    shutil.copytree(tmp_path / "theirs" / "checkpoints" / "step-000009", folder / "step-000009")

    assert ours.newest() == (folder / "step-000004", replace(STATE, step=4))
    assert (folder / "step-000009").is_dir()

    policy, optimizer = _new(ranks)
    _train(policy, optimizer, range(1, 2), ranks)
    ours.save(replace(STATE, step=6), policy, optimizer)
    assert [path.name for path in ours.all()] == ["step-000004", "step-000006", "step-000009"]


def test_a_learner_that_was_replaced_cannot_save_over_its_successors_checkpoints(
    tmp_path: Path, ranks: Ranks
) -> None:
    checkpoints = _saved(tmp_path / "checkpoints", ranks)
    policy, optimizer = _new(ranks)
    _train(policy, optimizer, range(1, 2), ranks)
    write_lineages(tmp_path, {1: 0, 2: 2})

    for step in (2, 7):
        with pytest.raises(LostLineage, match="newest lineage, 2, got one of 1"):
            checkpoints.save(replace(STATE, step=step), policy, optimizer)

    assert checkpoints.newest() == (tmp_path / "checkpoints" / "step-000002", STATE)


def test_the_runs_key_is_private_and_outside_of_what_is_copied(
    tmp_path: Path, ranks: Ranks
) -> None:
    checkpoints = _saved(tmp_path / "checkpoints", ranks)
    key = tmp_path / "checkpoint.key"

    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o700

    key.chmod(0o644)
    with pytest.raises(CheckpointError, match="readable by its owner alone, got mode 0644"):
        checkpoints.newest()

    key.chmod(0o600)
    key.write_text("short")
    with pytest.raises(CheckpointError, match="bytes in hexadecimal, got 0 that can be read"):
        checkpoints.newest()


def test_a_rank_that_is_late_has_measured_its_files_before_the_first_renames_the_folder(
    tmp_path, monkeypatch, ranks
):
    folder = tmp_path / ".unfinished-step-000002"
    folder.mkdir()

    def gathered(_ranks, own, _reason):
        folder.rename(tmp_path / "step-000002")
        return own, ""

    monkeypatch.setattr(verification, "gather_digests", gathered)

    digests, num_bytes = verification.write_files(folder, {"tensors-1": [b"abc", b"de"]}, ranks)

    assert (list(digests), num_bytes) == (["tensors-1"], 5)
