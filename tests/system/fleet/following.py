"""Actors of a real ring follow the number that it wants, up and down.

Beside CI: `pytest -q tests/system/fleet/following.py`. Real Redis, broker, learner and small
engines; an environment that waits for longer or shorter is the load, and the learner is paced,
since all of them share two cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.transport.keys import make_client, make_keys
from configs.loader import load, save
from configs.settings import Settings
from console.run.redis_server import free_port
from tests.console.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0
BATCHES = 130
MOST = 4
PACE_S = 1.6
SLOW, FAST = "2.0", "0.35"
"""Seconds of a step of the environment: with four actors hardly, and with two amply enough."""


class Fleet:
    """A ring in a folder, and its actors."""

    def __init__(self, folder: Path, name: str, url: str) -> None:
        self.folder, self.wait_file = folder / name, folder / f"{name}.wait"
        self._url = url
        self.processes: list[subprocess.Popen[bytes]] = []
        self.actors: list[subprocess.Popen[bytes]] = []
        self._started = 0
        self.settings = self._settings(folder, name)
        self.folder.mkdir(exist_ok=True)
        make_keys(self.folder / "keys")
        save(self.settings, self.folder / "config.yaml")

    def _settings(self, folder: Path, name: str) -> Settings:
        words = {"dataset": "spell_backward", "prompt_style": "compact", "dense": True}
        words |= {"min_word_len": 3, "max_word_len": 3, "wait_file": str(self.wait_file)}
        changes = [
            *(f"run.name={name}", f"run.directory={folder}", f"run.steps={BATCHES}"),
            f"run.environment={ROOT}/tests/system/support/waiting_words.py:WaitingWords",
            f"run.environment_settings={json.dumps(words)}",
            *("run.max_policy_lag=2", "run.eval_episodes=0", "actors.max_concurrent_episodes=4"),
            f"broker.endpoint=tcp://127.0.0.1:{free_port('127.0.0.1')}",
            *("actors.count=0", f"fleet.max_actors={MOST}", "learner.checkpoint_every=1000"),
        ]
        return load(ROOT / "configs" / "tiny.yaml", changes)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        environment = {"PYTHONPATH": str(ROOT), "NYALA_REDIS_URL": self._url}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def keep(self, number: int) -> None:
        """Start or drain actors."""
        self.actors = [actor for actor in self.actors if actor.poll() is None]
        for actor in self.actors[number:]:
            actor.send_signal(signal.SIGTERM)
        self.actors = self.actors[:number]
        while len(self.actors) < number:
            self._started += 1
            name = f"actor-{self._started}"
            make_client(self.folder / "keys", name)
            self.actors.append(self.start("actors", "--config", "config.yaml", "--name", name))

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def log(self) -> str:
        return (self.folder / "log").read_text()[-6000:]


@contextmanager
def running(fleet: Fleet) -> Iterator[subprocess.Popen[bytes]]:
    """Broker and learner, ended at the end."""
    fleet.start("broker", "--config", "config.yaml")
    learner = fleet.start(
        "tests.system.support.paced_learner", str(PACE_S), "--config", "config.yaml"
    )
    try:
        yield learner
    finally:
        for process in fleet.processes:
            process.terminate()
        for process in fleet.processes:
            process.wait(60)


def follow(
    fleet: Fleet, learner: subprocess.Popen[bytes], until: Callable[[int], bool]
) -> list[int]:
    """Keep as many actors as are wanted until this number is; returns all numbers on the way."""
    numbers: list[int] = []

    def look() -> bool:
        assert learner.poll() in {None, 0}, fleet.log()
        rows = fleet.rows
        wanted = rows[-1]["actors_wanted"] if rows else 1
        if not numbers or numbers[-1] != wanted:
            numbers.append(wanted)
        fleet.keep(wanted)
        time.sleep(0.5)
        return learner.poll() is not None or until(wanted)

    wait_until(look, timeout_s=PATIENCE_S)
    return numbers


@pytest.mark.timeout(1500)
def test_actors_follow_the_number_up_and_down_and_every_batch_is_trained_once(
    redis_url: str, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, "moving", redis_url)
    fleet.wait_file.write_text(SLOW)
    make = ["-c", "from console.main import app; app()", "init-model", "moving/config.yaml"]
    subprocess.run([sys.executable, *make], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    with running(fleet) as learner:
        up = follow(fleet, learner, lambda wanted: wanted == MOST)
        then = len(fleet.rows)
        follow(fleet, learner, lambda _: len(fleet.rows) >= then + 8)
        fleet.wait_file.write_text(FAST)
        down = follow(fleet, learner, lambda wanted: wanted == 2)
        follow(fleet, learner, lambda _: False)
        assert learner.returncode == 0, fleet.log()
    assert (up[0], up[-1]) == (1, MOST)
    assert down[-1] == 2, [row["actors_wanted_why"] for row in fleet.rows[-20:]]

    assert [row["step"] for row in fleet.rows] == list(range(1, BATCHES + 1))
