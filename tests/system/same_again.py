"""Repeatable runs at length: twenty deaths of actors, and those of every other role.

Run beside CI, `pytest tests/system/same_again.py`; it takes a quarter of an hour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.support.repeated_run import Kills, curve, started, weights

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]

STEPS = "run.steps=24"
PATIENCE_S = 1800.0


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Curve and weights of two actors that nobody disturbs."""
    run = started(tmp_path_factory.mktemp("undisturbed"), "quiet", STEPS, "actors.count=2")
    with run.up() as process:
        run.finish(process, within_s=PATIENCE_S)
    return curve(run), weights(run)


def test_twenty_deaths_of_actors_change_no_bit(
    quiet: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    run = started(tmp_path, "killed", STEPS, "actors.count=2")
    with run.up() as process:
        kills = Kills(run, process, seed=20)
        kills.actors(20)
        summary = run.finish(process, within_s=PATIENCE_S)

    assert kills.count["actors"] == 20
    assert summary["resumed_episodes"] > 0
    assert (curve(run), weights(run)) == quiet


@pytest.mark.parametrize("actors", [1, 3])
def test_the_number_of_actors_changes_no_bit(
    quiet: tuple[list[dict[str, Any]], str], tmp_path: Path, actors: int
) -> None:
    run = started(tmp_path, "number", STEPS, f"actors.count={actors}")
    with run.up() as process:
        run.finish(process, within_s=PATIENCE_S)

    assert (curve(run), weights(run)) == quiet


def test_deaths_of_learner_broker_and_actors_change_no_bit(
    quiet: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    run = started(tmp_path, "all", STEPS, "actors.count=2")
    with run.up() as process:
        kills = Kills(run, process, seed=3)
        for role in ("broker", "learner", "learner", "broker", "learner"):
            kills.actors(1)
            kills.one(role)
        summary = run.finish(process, within_s=PATIENCE_S)

    assert kills.count == {"actors": 5, "broker": 2, "learner": 3}
    assert summary["learner_lives"] > 1  # one that is killed at its start is not counted
    assert (curve(run), weights(run)) == quiet
