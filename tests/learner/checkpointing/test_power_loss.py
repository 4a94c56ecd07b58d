"""Checkpoints and lineages on a disk that loses power at any operation, tears, rots and fills up.

A learner saves, publishes under its lineages, and COMMITs, one after the other, until the power
goes. What it had committed is then in a checkpoint that can be trusted, and no lineage that it had
begun is forgotten.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs import durable
from configs.errors import CheckpointError
from learner.checkpointing import checkpoint
from learner.checkpointing.folders import LINEAGES, STATE, read_lineages, write_lineages
from learner.checkpointing.learner_state import LearnerState
from learner.reporting.metrics import Totals
from tests.learner.support.stored_bytes import WEIGHTS, StoredBytes
from tests.simulation.disk import FaultyDisk, PowerLossError


@dataclass
class Machine:
    """A learner without tensors, its disk, and what it has told the rest of the world."""

    folder: Path
    disk: FaultyDisk
    committed: int = 0
    lineages: dict[int, int] = field(default_factory=dict)
    """Those under which something was published."""

    @property
    def checkpoints(self) -> StoredBytes:
        return StoredBytes(self.folder, keep=2)

    def live(self) -> None:
        """Resume, begin a lineage, and train some batches, with COMMIT after each checkpoint."""
        newest = self.checkpoints.newest()
        step = newest[1].step if newest is not None else 0
        remembered = read_lineages(self.folder)
        lineage = max([0, *remembered, *([newest[1].lineage] if newest else [])]) + 1
        write_lineages(self.folder, remembered | {lineage: step})
        self.lineages[lineage] = step
        for k in range(step + 1, step + 4):
            self.checkpoints.save_bytes(_state(k, lineage), _weights(k, lineage))
            self.committed = k

    def step_on_disk(self) -> int:
        """The batch up to which a learner that starts now resumes."""
        newest = self.checkpoints.newest()
        return newest[1].step if newest is not None else 0


def _state(step: int, lineage: int) -> LearnerState:
    return LearnerState(
        run="r",
        settings_hash="h",
        step=step,
        lineage=lineage,
        cursor=step,
        trained=((0, step),),
        totals=Totals(),
    )


def _weights(step: int, lineage: int) -> bytes:
    return f"{step} of {lineage}".encode() * 50


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose disk is simulated."""
    folder = tmp_path / "run"
    folder.mkdir()
    disk = FaultyDisk(folder, random.Random(0))

    monkeypatch.setattr(durable, "DISK", disk)
    return Machine(folder, disk)


def _lose_power_at(machine: Machine, operation: int, *, worst: bool = False) -> bool:
    """Live until an operation of the disk; returns whether life got that far."""
    disk = machine.disk
    disk.operations, disk.loses_power_after = 0, operation
    try:
        machine.live()
    except PowerLossError:
        survived = False
    else:
        survived = True
    disk.loses_power_after = None
    disk.lose_power(worst=worst)
    return not survived


@pytest.mark.parametrize("worst", [True, False])
def test_what_is_committed_survives_a_power_loss_at_any_operation(
    machine: Machine, worst: bool
) -> None:
    losses = 0
    for operation in range(1, 71):
        machine.disk.rng.seed(operation)
        losses += _lose_power_at(machine, operation % 70 + 1, worst=worst)

        assert machine.step_on_disk() >= machine.committed, f"COMMIT was ahead at {operation}"
        known = read_lineages(machine.folder)
        assert machine.lineages.items() <= known.items(), f"a lineage is forgotten at {operation}"
    assert losses > 30


@pytest.mark.slow
def test_a_checkpoint_that_replaces_one_of_its_step_leaves_either(machine: Machine) -> None:
    checkpoints = machine.checkpoints
    checkpoints.save_bytes(_state(1, 1))
    losses = 0
    for trial in range(1, 181):
        machine.disk.rng.seed(trial)
        machine.disk.operations, machine.disk.loses_power_after = 0, trial % 24 + 1
        try:
            checkpoints.save_bytes(_state(1, 1 + trial))
        except PowerLossError:
            losses += 1
        machine.disk.loses_power_after = None
        machine.disk.lose_power(worst=trial % 3 == 0)

        newest = checkpoints.newest()
        assert newest is not None, f"neither is there in trial {trial}"
        assert newest[1].step == 1
    assert 100 < losses < 180


def test_a_full_disk_costs_no_checkpoint_that_was_there(machine: Machine) -> None:
    machine.live()
    machine.disk.is_full = True

    with pytest.raises(OSError, match="No space left"):
        machine.checkpoints.save_bytes(_state(9, 1))
    assert not list(machine.folder.rglob(".unfinished*")), "it keeps the disk full"
    machine.disk.lose_power(worst=True)

    assert machine.step_on_disk() == machine.committed == 3
    machine.disk.is_full = False
    machine.checkpoints.save_bytes(_state(9, 1))
    assert machine.step_on_disk() == 9


def test_a_bit_that_rots_is_noticed_wherever_it_is(machine: Machine) -> None:
    for seed in range(15):
        machine.live()
        newest = machine.checkpoints.all()[-1]
        machine.disk.rng.seed(seed)
        machine.disk.rot(machine.disk.rng.choice(sorted(newest.iterdir())))

        assert machine.step_on_disk() == machine.committed - 1, "a rotten checkpoint was trusted"
        machine.committed -= 1  # as the learner reports: RESUMING BEFORE THE LAST COMMIT


def test_a_bit_that_rots_in_the_lineages_makes_no_other_lineage(machine: Machine) -> None:
    machine.live()
    machine.live()
    file, known = machine.folder / LINEAGES, read_lineages(machine.folder)
    content = file.read_bytes()
    for place in range(8 * len(content)):
        rotten = bytearray(content)
        rotten[place // 8] ^= 1 << place % 8
        file.write_bytes(rotten)
        try:
            assert read_lineages(machine.folder) == known, f"bit {place} is believed"
        except CheckpointError:
            continue
    file.write_text('{"1": 0}')
    assert read_lineages(machine.folder) == {1: 0}, "as an earlier release wrote it"


def _lives_on_a_lying_disk(machine: Machine) -> Counter[str]:
    """Lose power again and again; what is trusted afterwards must be what was saved."""
    outcomes = Counter[str]()
    disk = machine.disk
    for seed in range(25):
        disk.rng.seed(seed)
        disk.lies = 0.2
        machine.live()
        disk.lose_power()
        disk.lies = 0.0
        try:
            newest = machine.checkpoints.newest()
            known = read_lineages(machine.folder)
        except CheckpointError:
            outcomes["refused"] += 1
            newest = None
        else:
            assert known.items() <= machine.lineages.items(), "a lineage that nobody has begun"
        if newest is not None:
            path, state = newest
            weights = (path / WEIGHTS).read_bytes()
            assert state == _state(state.step, state.lineage)
            assert weights == _weights(state.step, state.lineage), "torn weights are trusted"
            outcomes["kept" if state.step == machine.committed else "behind"] += 1
        for leftover in [machine.folder / "checkpoints", *machine.folder.iterdir()]:
            disk.remove(leftover)
        machine.committed = 0
        machine.lineages.clear()
    return outcomes


def test_what_a_lying_disk_leaves_is_whole_or_refused(machine: Machine) -> None:
    outcomes = _lives_on_a_lying_disk(machine)

    assert min(outcomes[outcome] for outcome in ("refused", "behind", "kept")) > 1, outcomes


def test_a_checkpoint_that_is_not_compared_with_its_manifest_is_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believes(path: Path, _: object) -> LearnerState:
        return LearnerState.decode((path / STATE).read_text())

    monkeypatch.setattr(checkpoint, "verify", believes)

    with pytest.raises((AssertionError, OSError)):
        _lives_on_a_lying_disk(machine)


@pytest.mark.parametrize(
    "skipped", ["content", "name"], ids=lambda what: f"the sync of a {what} is left out"
)
def test_a_sync_that_is_left_out_is_noticed(machine: Machine, skipped: str) -> None:
    sync = machine.disk.sync

    def half(path: Path) -> None:
        if path.is_dir() == (skipped == "content"):
            sync(path)

    machine.disk.sync = half  # type: ignore[method-assign]

    with pytest.raises((AssertionError, CheckpointError)):
        test_what_is_committed_survives_a_power_loss_at_any_operation(machine, worst=True)
