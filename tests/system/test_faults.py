"""Whole runs in which processes are killed: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from broker.transport.allow_list import Role, add
from configs.loader import load
from console.live.top import Address, RemoteRun
from tests.system.support import paced_reward
from tests.system.support.hostile_actor import attack
from tests.system.support.live_run import TORCH, LiveRun, assert_nothing_lost_or_repeated, end

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

# Random weights end an episode once in a hundred tokens, so kills find episodes half done.
LONG = (
    *TORCH,
    "run.steps=30",
    "run.max_completion_tokens=96",
    "learner.warm_start_steps=0",
    "actors.max_concurrent_episodes=16",
    "broker.lease_timeout_s=3",
)

# A batch takes as long on every machine, so that none ends the run before others have joined.
PACED = f"run.reward={paced_reward.__file__}:paced"

HALF_DONE = 2  # episodes of the victim with tokens in the store


def kill_one_in_mid_episode(run: LiveRun) -> bool:
    """Kill an actor whose episodes are half done, if one is: it is stopped while that is read."""
    for name, pid in run.actor_processes().items():
        os.kill(pid, signal.SIGSTOP)
        is_victim = run.half_done(name) >= HALF_DONE
        os.kill(pid, signal.SIGKILL if is_victim else signal.SIGCONT)
        if is_victim:
            return True
    return False


def kill_actors_until_one_is_continued(run: LiveRun, up: subprocess.Popen[str]) -> None:
    """Kill actors in mid-episode; what the last one held may have been too old to train."""
    for _ in range(6):
        run.wait_until(
            lambda: up.poll() is not None or kill_one_in_mid_episode(run), "an actor is killed"
        )
        trained = run.step
        run.wait_until(
            lambda: run.step >= trained + 4 or up.poll() is not None,  # noqa: B023 - called at once
            "the other actor goes on",
        )
        if up.poll() is not None or any(line["resumed_episodes"] for line in run.lines("metrics")):
            return


def test_killed_actors_work_is_continued_by_another(tmp_path: Path) -> None:
    # Whose actor died knows it at once: nobody waits for leases to expire.
    leases = "broker.lease_timeout_s=600"
    # On a quick machine an episode takes as long as a snapshot, so few are found half done.
    many = ("run.steps=60", "actors.snapshot_s=0.05", "actors.count=2")
    run = LiveRun(tmp_path, "tiny.yaml", *LONG, leases, *many)

    with run.up() as process:
        run.wait_until(lambda: len(run.actors()) == 2, "both actors' episodes are trained")
        kill_actors_until_one_is_continued(run, process)
        summary = run.finish(process)

    assert summary["resumed_episodes"] > 0
    assert summary["tasks_dead"] == 0
    assert_nothing_lost_or_repeated(run, summary)


def test_killed_learner_replays_its_sealed_claims(tmp_path: Path) -> None:
    overrides = (*LONG, "run.steps=15", "learner.checkpoint_every=3", "console.max_restarts=0")
    run = LiveRun(tmp_path, "tiny.yaml", *overrides)

    with run.up() as process:
        run.wait_until(lambda: run.step >= 5, "two batches past the first checkpoint")
        os.kill(run.pids("learner")[0], signal.SIGKILL)
        run.wait_until(lambda: process.poll() is not None, "up gives up")
        assert process.returncode != 0
        before = {line["step"]: line["group_ids"] for line in run.lines("batches")}
    with run.up() as process:
        summary = run.finish(process)

    after = {line["step"]: line["group_ids"] for line in run.lines("batches")}
    replayed = [line["step"] for line in run.lines("metrics") if line["is_replay"]]
    assert replayed, "the batches after the checkpoint were claimed before the crash"
    assert all(after[step] == before[step] for step in before)
    assert summary["learner_lives"] == 2
    assert_nothing_lost_or_repeated(run, summary)


def assert_seen_from_elsewhere(run: LiveRun, place: Path) -> None:
    """`nyala top tcp://...` with nothing but two keys shows the figures of `metrics.jsonl`."""
    place.mkdir()
    keys = run.folder / "keys"
    shutil.copy2(add(keys, "ana", Role.OBSERVER), place)
    shutil.copy2(keys / "broker.pub", place)
    endpoint = load(run.folder / "config.yaml").broker.endpoint
    seen = RemoteRun(Address(endpoint, run.folder.name), place / "ana.key")
    views = [seen.read_view()]

    def shows_all() -> bool:
        views.append(seen.read_view())  # on a busy machine an actor is silent for a while
        return views[-1].progress.step >= 2 and views[-1].actors_alive == 1

    try:
        run.wait_until(shows_all, "an observer sees two batches and the one actor")
    finally:
        seen.close()
    progress = views[-1].progress
    (line,) = (each for each in run.lines("metrics") if each["step"] == progress.step)
    assert (progress.policy_lag, progress.policy_lag_max) == (
        line["policy_lag_mean"],
        line["policy_lag_max"],
    )
    rewards = [each["reward_mean"] for each in run.lines("metrics")[: progress.step]]
    assert progress.rewards == pytest.approx(rewards, rel=1e-4)


def test_late_actor_contributes_and_a_hostile_one_changes_nothing(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, "tiny.yaml", *LONG, PACED, "run.steps=40")

    with run.up() as process:
        run.wait_until(lambda: run.step >= 2, "the run is on its way")
        begun_at = run.step
        assert_seen_from_elsewhere(run, tmp_path / "elsewhere")
        late = run.start("actor", str(run.folder))
        try:
            poison, flood = asyncio.run(attack(run.folder))
            assert "vocabulary of run.model" in poison
            assert "run.max_completion_tokens = 96, got 8000 tokens" in flood
            run.wait_until(
                lambda: len(run.actors()) == 2 or process.poll() is not None,
                "the late actor's episodes are trained",
            )
        finally:
            end(late)
        assert late.returncode == 0
        summary = run.finish(process)

    assert len(run.actors()) == 2
    [first] = [line for line in run.log("actor") if line["event"] == "first tokens"]
    assert "starts again" not in (tmp_path / "up.log").read_text(), "no actor has died"
    assert first["step"] >= begun_at, "its very first tokens are of current weights"
    assert_nothing_lost_or_repeated(run, summary)


def test_a_run_of_two_turn_episodes_survives_killed_actors(tmp_path: Path) -> None:
    """Its episodes are short; `tests/actors/test_loop.py` kills exactly between two turns."""
    overrides = (
        *TORCH,
        "run.steps=40",
        "run.group_size=8",
        "run.groups_per_batch=8",
        "run.eval_episodes=8",
        "learner.init_layers=1",
        "learner.init_width=64",
        "learner.warm_start_steps=60",
        "learner.warm_start_batch=64",
        "actors.max_concurrent_episodes=8",
        "actors.count=2",
        "broker.lease_timeout_s=3",
    )
    run = LiveRun(tmp_path, "calculator.yaml", *overrides)

    with run.up() as process:
        run.wait_until(lambda: len(run.actors()) == 2, "both actors' episodes are trained")
        kill_actors_until_one_is_continued(run, process)
        summary = run.finish(process)

    two_turns = sum(
        line["completion_tokens"] - line["trained_tokens"] for line in run.lines("metrics")
    )
    assert two_turns > 0, "tool tokens are masked, not trained"
    assert_nothing_lost_or_repeated(run, summary)


def test_ctrl_c_saves_and_up_goes_on(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, "tiny.yaml", *LONG, "run.steps=12", "learner.checkpoint_every=100")

    with run.up() as process:
        run.wait_until(lambda: run.step >= 3, "three batches are trained")
        assert any(path.is_socket() for path in run.folder.rglob("*"))
        assert files_of_others(run.folder) == []
        end(process)
        assert not run.pids("actors") + run.pids("learner") + run.pids("broker")
    trained = run.step
    with run.up() as process:
        summary = run.finish(process)

    assert trained >= 3
    assert summary["learner_lives"] == 2
    assert not any(line["is_replay"] for line in run.lines("metrics")[:trained])
    assert_nothing_lost_or_repeated(run, summary)
    names = {path.name for path in run.folder.iterdir()}
    assert {"checkpoints", "logs", "model", "report.html"} <= names
    assert files_of_others(run.folder) == []


def files_of_others(folder: Path) -> list[Path]:
    """List what more than its group may read, or more than its owner may write."""
    found = [path for path in folder.rglob("*") if not path.is_symlink()]
    return [path for path in found if path.lstat().st_mode & 0o027]
