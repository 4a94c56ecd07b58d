"""An actor that has nothing but a join-pack, in a real run of a small engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.transport.allow_list import read_allowed
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0  # importing torch takes a minute where the cores are shared


class Machines:
    """The run's machine and another one: folders, and processes that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "hub" / "runs" / "tiny"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, machine: str, *arguments: str) -> subprocess.Popen[str]:
        place = self.folder / machine
        place.mkdir(exist_ok=True)
        own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(place / "cache"), "NO_COLOR": "1"}
        with (place / f"{arguments[0]}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", "from console.main import app; app()", *arguments],
                cwd=place,
                env={k: v for k, v in os.environ.items() if k != "NYALA_REDIS_URL"} | own,
                stdout=log,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        return process

    def log(self, machine: str, verb: str) -> str:
        return (self.folder / machine / f"{verb}.log").read_text()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    for process in reversed(machines.started):
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.live
@pytest.mark.timeout(400)
def test_an_actor_with_a_pack_alone_trains_the_run_and_one_with_a_revoked_pack_is_refused(
    machines: Machines,
) -> None:
    small = ("actors.count=0", "run.steps=2", "run.eval_episodes=0", "learner.warm_start_steps=0")
    flags = [f"--set={each}" for each in small]
    up = machines.start("hub", "up", str(ROOT / "configs" / "tiny.yaml"), *flags)
    wait_until(
        lambda: up.poll() is not None or (machines.run / "logs" / "learner.log").exists(),
        timeout_s=PATIENCE_S,
    )
    for name in ("site", "gone"):
        pack = machines.start(
            *("hub", "join-pack", str(machines.run), "--host=127.0.0.1", f"--name={name}"),
            f"--out={machines.folder / name}.nyala",
        )
        assert pack.wait(PATIENCE_S) == 0, machines.log("hub", "join-pack")
    assert machines.start("hub", "keys", "revoke", "gone", f"--in={machines.run}").wait(60) == 0

    refused = machines.start("far", "actor", str(machines.folder / "gone.nyala"))
    assert refused.wait(PATIENCE_S) == 2, machines.log("far", "actor")
    assert "refused this key" in machines.log("far", "actor")
    actor = machines.start("near", "actor", str(machines.folder / "site.nyala"))

    assert up.wait(PATIENCE_S) == 0, machines.log("hub", "up") + machines.log("near", "actor")
    assert actor.wait(60) == 0, machines.log("near", "actor")
    rows = (machines.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    holders = {member.enrolled_by for member in read_allowed(machines.run / "keys").values()}
    assert "site" in holders
