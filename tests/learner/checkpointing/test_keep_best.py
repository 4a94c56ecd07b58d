"""The checkpoint of the best evaluation stays beside the newest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learner.checkpointing.folders import best_of
from learner.checkpointing.learner_state import LearnerState
from learner.reporting.journal import Journal
from learner.reporting.metrics import Totals
from tests.learner.support.stored_bytes import StoredBytes
from tests.learner.support.tiny_run import tiny_settings

STATE = LearnerState("r", "h", 1, lineage=1, cursor=0, trained=(), totals=Totals())


def _steps(checkpoints: StoredBytes) -> list[str]:
    return [path.name.removeprefix("step-00000") for path in checkpoints.all()]


def _save(checkpoints: StoredBytes, step: int, accuracy: float | None = None) -> None:
    """Save, and let an evaluation end after it."""
    checkpoints.save_bytes(replace(STATE, step=step))
    if accuracy is not None:
        Journal(checkpoints._folder.parent).append("eval", {"step": step, "accuracy": accuracy})


def test_the_best_stays_and_so_does_one_that_may_become_it(tmp_path: Path) -> None:
    kept = StoredBytes(tmp_path / "kept", keep=1, is_evaluated=lambda step: step % 2 == 0)

    _save(kept, 1)
    _save(kept, 2)
    assert _steps(kept) == ["2"]
    _save(kept, 3)
    assert _steps(kept) == ["2", "3"], "its evaluation has not ended"
    Journal(tmp_path / "kept").append("eval", {"step": 2, "accuracy": 0.5})
    _save(kept, 4, accuracy=0.4)
    assert _steps(kept) == ["2", "4"]
    _save(kept, 5)
    assert _steps(kept) == ["2", "5"], "4 was evaluated, and is not better"
    _save(kept, 6, accuracy=0.5)
    _save(kept, 7)
    assert _steps(kept) == ["6", "7"], "the later of equal ones"

    assert best_of(kept.all(), Journal(tmp_path / "kept").scores()) == kept.path_of(6)
    assert best_of(kept.all(), {}) is None


def test_without_the_setting_only_the_newest_stay(tmp_path: Path) -> None:
    plain = StoredBytes(tmp_path, keep=2)
    for step in range(1, 5):
        _save(plain, step, accuracy=1 / step)
    assert _steps(plain) == ["3", "4"]


@pytest.mark.parametrize("eval_every", [0, 7])
def test_what_is_evaluated_has_to_be_in_a_checkpoint(tmp_path: Path, eval_every: int) -> None:
    learner = {"keep_best": True, "checkpoint_every": 5}
    with pytest.raises(ValueError, match=r"multiple of learner\.checkpoint_every = 5"):
        tiny_settings(tmp_path, run={"eval_every": eval_every}, learner=learner)
    tiny_settings(tmp_path, run={"eval_every": 10}, learner=learner)
