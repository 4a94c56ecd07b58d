"""Ranks of a machine some of whose GPUs are gone."""

from __future__ import annotations

from typing import Any

import pytest

from configs.errors import SettingsError
from configs.settings import LearnerSettings, ParallelSettings, RunSettings, Settings
from learner import launch as counting
from learner.launch import fits_of, usable_ranks


@pytest.mark.parametrize(
    ("learner", "parallel", "gpus", "ranks"),
    [
        ({"ranks": 8}, {}, 0, 8),
        ({"ranks": 8, "min_ranks": 4, "device": "cpu"}, {}, 0, 8),
        ({"ranks": 8, "min_ranks": 4}, {}, 0, 8),
        ({"ranks": 8, "min_ranks": 4}, {}, 8, 8),
        ({"ranks": 8, "min_ranks": 4}, {}, 7, 7),
        ({"ranks": 8, "min_ranks": 4}, {"sequence": 2}, 7, 6),
        ({"ranks": 4, "min_ranks": 1, "device": "cuda"}, {"replicate": 2}, 3, 2),
    ],
)
def test_as_many_ranks_start_as_work_and_can_be_divided(
    learner: dict[str, Any],
    parallel: dict[str, int],
    gpus: int,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counting, "_count_gpus", lambda: gpus)
    settings = Settings(
        run=RunSettings(model="init"),
        learner=LearnerSettings(**learner),
        parallel=ParallelSettings(**parallel),
    )

    assert usable_ranks(settings.learner, fits_of(settings)) == ranks


def test_one_of_several_machines_needs_no_more_than_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counting, "_count_gpus", lambda: 3)
    learner = LearnerSettings(ranks=4, min_ranks=5)  # of both machines

    assert usable_ranks(learner, has_other_nodes=True) == 3


def test_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_count_gpus", lambda: 3)

    with pytest.raises(SettingsError, match=r"working GPUs for at least 4 rank.*, got 3"):
        usable_ranks(LearnerSettings(ranks=8, min_ranks=4))


def test_a_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "COUNT_GPUS", "import time; time.sleep(60)")
    monkeypatch.setattr(counting, "COUNT_S", 0.1)

    with pytest.raises(SettingsError, match=r"within 0\.1 s.*learner\.min_ranks"):
        usable_ranks(LearnerSettings(ranks=8, min_ranks=4))
