"""A run on a disk that fills up: for half a minute, and for good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.faults.stores import SIZE_MB, fill, small_disk
from tests.needs import needs
from tests.system.support import paced_reward
from tests.system.support.live_run import TORCH, LiveRun, assert_nothing_lost_or_repeated

pytestmark = [pytest.mark.live, pytest.mark.timeout(400), needs("root")]

FULL_S = 30.0
SAID_S = 15.0
"""How soon a person reads it."""
SAYS = f"the disk must have room, got 0.00 MiB free of {SIZE_MB}; free some space on the disk of "
STEPS = 12

RUN = (
    *TORCH,
    f"run.steps={STEPS}",
    f"run.reward={paced_reward.__file__}:paced",
    "console.max_restarts=0",
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    """A run whose folder has a disk of its own; what its console says is on another."""
    disk = tmp_path / "disk"
    with small_disk(disk):
        run = LiveRun(tmp_path, "tiny.yaml", f"run.directory={disk}", *RUN)
        run.folder = disk / "tiny"
        yield run


def said(run: LiveRun) -> str:
    return (run.folder.parents[1] / "up.log").read_text()


def unfinished(run: LiveRun) -> list[Path]:
    """List what was not written whole, of a checkpoint or any other file."""
    return [path for path in run.folder.rglob(".*") if path.name != ".lock"]


def test_a_disk_that_is_full_for_half_a_minute_costs_nothing(run: LiveRun) -> None:
    with run.up("--set", "console.max_restarts=100") as up:
        run.wait_until(lambda: run.step >= 3, "three batches are trained")
        with fill(run.folder.parent):
            until = time.monotonic() + FULL_S
            run.wait_until(lambda: SAYS in said(run), "the console says so", within_s=SAID_S)
            os.kill(run.pids("learner")[0], signal.SIGKILL)  # its next life begins on a full disk
            run.wait_until(lambda: time.monotonic() > until, "half a minute is over")
            assert up.poll() is None, run.logs()
        summary = run.finish(up)

    assert "start one" not in said(run)
    assert summary["learner_lives"] > 1
    assert_nothing_lost_or_repeated(run, summary)


def test_a_run_on_a_disk_that_stays_full_ends_and_goes_on_when_there_is_room(run: LiveRun) -> None:
    with run.up() as up, ExitStack() as full:
        run.wait_until(lambda: run.step >= 3, "three batches are trained")
        full.enter_context(fill(run.folder.parent))
        run.wait_until(lambda: up.poll() is not None, "it gives up")
        last = said(run)
        assert up.returncode == 1
        assert f"learner: {SAYS}" in last, last
        assert unfinished(run) == []
    with run.up() as up:
        summary = run.finish(up)

    assert summary["steps"] == STEPS
    assert_nothing_lost_or_repeated(run, summary)
