"""Learners that are killed: at every operation of a save, and at random moments of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from configs.settings import LearnerSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import local_of
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.forks import run_in_fork
from tests.learner.support.lives.killed_save import CASES, kill_all, name_of, train
from tests.learner.support.lives.resumed_runs import Findings
from tests.learner.support.tiny_policy import constant_rate, tiny_causal_lm

pytestmark = pytest.mark.slow


def _after(steps: int, ranks: Ranks) -> list[torch.Tensor]:
    """The parameters after so many steps of training, without any fault."""
    policy = Policy(tiny_causal_lm(layers=1), temperature=1.0)
    policy = shard(policy, ranks.mesh, dtype=torch.float32)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    for step in range(1, steps + 1):
        train(optimizer, step)
    return [local_of(parameter) for parameter in policy.parameters()]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the killed ones left."""
    folder = tmp_path_factory.mktemp("killed")
    run_in_fork(kill_all, folder, within_s=600)
    return folder


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_goes_through(killed: Path) -> None:
    found = Findings(**json.loads((killed / "found-1.json").read_text()))

    assert found.is_good, str(found)
    assert found.kills, "no life was killed"


def test_a_run_one_rank_of_which_was_out_of_memory_ends_as_one_with_smaller_pieces(
    killed: Path,
) -> None:
    found = Findings(**json.loads((killed / "found-2.json").read_text()))

    assert found.is_good, str(found)
    assert found.distance > 0, "the pieces were the same"


def test_a_kill_at_any_point_of_a_save_leaves_what_was_committed(
    killed: Path, ranks: Ranks
) -> None:
    expected = {steps: _after(steps, ranks) for steps in (1, 2)}

    found: list[tuple[int, int]] = []
    for case in CASES:
        folder = killed / name_of(case)
        committed = 2 if (folder / "commit-2").exists() else 1
        assert (folder / "commit-1").exists()
        checkpoints = Checkpoints(folder / "checkpoints", keep=1, ranks=ranks)
        newest = checkpoints.newest()
        assert newest is not None, f"nothing is left of {case}"
        path, state = newest
        assert state.step >= committed, f"COMMIT was ahead in {case}"

        policy = Policy(tiny_causal_lm(seed=3, layers=1), temperature=1.0)
        policy = shard(policy, ranks.mesh, dtype=torch.float32)
        optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
        checkpoints.load(path, policy, optimizer)
        ours = [local_of(parameter) for parameter in policy.parameters()]
        close = [
            torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, expected[state.step], strict=True)
        ]
        assert all(close), f"other weights are in the checkpoint of {case}"
        found.append((committed, state.step))

    assert set(found) == {(1, 1), (1, 2), (2, 2)}, "the kills miss a part of the save"
    assert found[-1][0] == 1
