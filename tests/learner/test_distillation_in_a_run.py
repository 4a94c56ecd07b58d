"""Whole runs that learn from teachers alone: one for each environment, and one that reads more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.settings import Settings
from learner.algorithm.methods import METHODS
from learner.model.ranks import Ranks
from tests.learner.support.ring_in_process import RingInProcess
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import tiny_settings

pytestmark = pytest.mark.slow

OPD = {
    key.removeprefix("algorithm."): value
    for method in METHODS
    if method.name == "OPD"
    for key, value in method.settings.items()
}


def _settings(folder: Path, algorithm: dict[str, Any], **run: object) -> Settings:
    return tiny_settings(
        folder,
        run={"groups_per_batch": 8, "group_size": 8, "steps": 60, **run},
        learner={"lr": 1e-2, "adam_beta2": 0.95},
        algorithm=OPD | algorithm,
    )


def _distances(settings: Settings) -> list[float]:
    lines = (settings.run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["teacher_kl"] for line in lines]


def test_a_run_comes_near_to_the_teacher_of_each_environment(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    teachers = {name: str(tmp_path / name) for name in ("sums", "words")}
    for folder in teachers.values():
        save_tiny_model(Path(folder), seed=1)
    environments = [{"environment": "calculator", "name": name} for name in teachers]
    settings = _settings(tmp_path, {"teacher": teachers}, environments=environments)

    assert RingInProcess(settings, redis_url, ranks).live()

    distances = _distances(settings)
    assert sum(distances[-5:]) < 0.5 * sum(distances[:5])


def test_a_run_learns_from_its_own_model_behind_a_message(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path, {"teacher_prompt": "hint"})

    assert RingInProcess(settings, redis_url, ranks).live()

    distances = _distances(settings)
    assert distances[0] > 0.05
    assert sum(distances[-5:]) < 0.5 * sum(distances[:5])
