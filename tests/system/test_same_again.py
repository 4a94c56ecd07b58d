"""The same run again, bit for bit: with actors killed in mid-episode, and without any actor."""

from __future__ import annotations

import hashlib
import json
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


def test_a_run_is_replayed_without_redis_and_actors_to_the_bit(tmp_path: Path) -> None:
    run = started(tmp_path, "run", *STEPS, "actors.count=1", "learner.keep_batches=6")
    with run.up() as process:
        run.finish(process)

    again = json.loads(run.ask("replay", str(run.folder), "--batches", "1:6", "--json"))

    assert again == []
    replayed = run.folder.with_name(f"{run.folder.name}-replay")
    lines = (replayed / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["grad_norm"] > 0 for line in lines] == 6 * [True]
    model = replayed / "model" / "model.safetensors"
    assert hashlib.sha256(model.read_bytes()).hexdigest() == weights(run)
