"""The same run again, bit for bit, though actors are killed in the middle of episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.support.repeated_run import Kills, curve, started, weights

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

STEPS = ("run.steps=6", "run.eval_episodes=0")


def test_a_run_whose_actors_are_killed_ends_equal_to_the_bit(tmp_path: Path) -> None:
    quiet = started(tmp_path, "quiet", *STEPS, "actors.count=1")
    killed = started(tmp_path, "killed", *STEPS, "actors.count=2")
    with quiet.up() as undisturbed:
        quiet.wait_until(lambda: bool(quiet.pids("broker")), "the model of both is made")
        with killed.up() as process:  # either samples or trains, so that each needs one core
            kills = Kills(killed, process, seed=1)
            kills.actors(3)
            kills.until_one_is_continued()
            killed.finish(process)
        quiet.finish(undisturbed)

    assert kills.count["actors"] >= 3
    assert any(line["resumed_episodes"] for line in killed.lines("metrics"))
    assert all(line["grad_norm"] > 0 for line in quiet.lines("metrics"))
    assert curve(killed) == curve(quiet)
    assert weights(killed) == weights(quiet)
