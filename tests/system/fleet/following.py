"""Actors follow the number that a real ring wants, and it learns as with a fixed fleet.

Beside CI: `pytest -s tests/system/fleet/following.py`, ten minutes. Real Redis, broker, learner
and small engines; an environment that waits for longer or shorter is the load, and the learner is
paced, since all of them share two cores.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from broker.transport.keys import make_client, make_keys
from configs.loader import load, save
from console.run.redis_server import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0
BATCHES = 70
MOST = 4
PACE_S = 1.3
SLOW, FAST = "1.4", "0.3"
"""Seconds of a step of the environment: with four actors hardly, and with two amply enough."""
WINDOW = 10
"""Batches, of 64 episodes each, whose mean reward is one point of a curve."""
MARGIN = 0.03
"""Of mean rewards: one and a half standard errors of the difference of two such points."""
LEARNED = 0.15
"""Mean rewards of a run rise by at least that much."""

WORDS = {"dataset": "spell_backward", "prompt_style": "compact", "dense": True}
CHANGES = (
    f"run.steps={BATCHES}",
    f"run.environment={ROOT}/tests/system/support/waiting_words.py:WaitingWords",
    *("run.group_size=8", "run.groups_per_batch=8", "run.eval_every=0"),
    *("actors.engine=torch", "actors.count=0", "actors.max_concurrent_episodes=16"),
    *(f"fleet.max_actors={MOST}", "actors.heartbeat_s=0.5", "learner.checkpoint_every=1000"),
)


class Fleet:
    """A ring in a folder, and its actors.

    Args:
        folder: Of all rings.
        name: Of the run.
        url: Of Redis.
        changes: Of settings.
    """

    def __init__(self, folder: Path, name: str, url: str, *changes: str) -> None:
        self.folder, self.wait_file = folder / name, folder / f"{name}.wait"
        self._url = url
        self.processes: list[subprocess.Popen[bytes]] = []
        self.actors: list[subprocess.Popen[bytes]] = []
        self._started = 0
        words = {**WORDS, "min_word_len": 3, "max_word_len": 6, "wait_file": str(self.wait_file)}
        own = [
            *(f"run.name={name}", f"run.directory={folder}"),
            f"run.environment_settings={json.dumps(words)}",
            f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
        ]
        self.folder.mkdir()
        make_keys(self.folder / "keys")
        settings = load(ROOT / "configs" / "demo.yaml", [*CHANGES, *own, *changes])
        save(settings, self.folder / "config.yaml")

    def wait(self, seconds: str) -> None:
        """Let each step of the environment take so long from now on."""
        self.wait_file.write_text(seconds)

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

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def log(self) -> str:
        return (self.folder / "log").read_text()[-6000:]

    @property
    def accuracy(self) -> float:
        """Of greedy answers to held-out words, after the last batch."""
        summary = json.loads((self.folder / "summary.json").read_text())
        return float(summary["held_out_accuracy_after"])


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
        rows = fleet.rows()
        wanted = rows[-1]["actors_wanted"] if rows else 1
        if not numbers or numbers[-1] != wanted:
            numbers.append(wanted)
        fleet.keep(wanted)
        time.sleep(0.5)
        return learner.poll() is not None or until(wanted)

    wait_until(look, timeout_s=PATIENCE_S)
    return numbers


def train_moving(fleet: Fleet) -> int:
    """Train with as many actors as are wanted; returns the batch at which the load fell."""
    fleet.wait(SLOW)
    with running(fleet) as learner:
        up = follow(fleet, learner, lambda wanted: wanted == MOST)
        then = len(fleet.rows())
        follow(fleet, learner, lambda _: len(fleet.rows()) >= then + 8)
        fell = len(fleet.rows())
        fleet.wait(FAST)
        down = follow(fleet, learner, lambda wanted: wanted == 2)
        follow(fleet, learner, lambda _: False)
        assert learner.returncode == 0, fleet.log()
    print("\nwanted", up, "at batch", then, "and", down, "after batch", fell)
    assert (up[0], up[-1]) == (1, MOST)
    assert down[-1] == 2, [row["actors_wanted_why"] for row in fleet.rows()[-20:]]
    return fell


def train_fixed(fleet: Fleet, fell: int) -> None:
    """Train with `MOST` actors from the first batch, under the same load."""
    fleet.wait(SLOW)
    with running(fleet) as learner:
        fleet.keep(MOST)
        wait_until(
            lambda: learner.poll() is not None or len(fleet.rows()) >= fell, timeout_s=PATIENCE_S
        )
        fleet.wait(FAST)
        assert learner.wait(PATIENCE_S) == 0, fleet.log()


def curve(fleet: Fleet) -> list[float]:
    """Mean rewards of each window of batches."""
    rewards = [row["reward_mean"] for row in fleet.rows()]
    return [
        statistics.fmean(rewards[first : first + WINDOW]) for first in range(0, BATCHES, WINDOW)
    ]


def apart(one: list[float], other: list[float]) -> float:
    """Mean distance of two curves."""
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.timeout(1500)
def test_actors_follow_the_number_and_the_curve_is_that_of_a_fixed_fleet(
    redis_url: str, tmp_path: Path
) -> None:
    first = Fleet(tmp_path, "first", redis_url)
    make = ["-c", "from console.main import app; app()", "init-model", "first/config.yaml"]
    subprocess.run([sys.executable, *make], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    model = f"run.model={first.folder / 'init'}"

    moving = Fleet(tmp_path, "moving", redis_url, model)
    fell = train_moving(moving)
    fixed = [
        Fleet(tmp_path, f"fixed-{seed}", redis_url, model, f"run.seed={seed}") for seed in range(3)
    ]
    for fleet in fixed:
        train_fixed(fleet, fell)

    for fleet in (moving, *fixed):
        points = " ".join(f"{point:.3f}" for point in curve(fleet))
        print(f"{fleet.folder.name}: {points}, held out {fleet.accuracy:.3f}")
        assert [row["step"] for row in fleet.rows()] == list(range(1, BATCHES + 1))
        groups = [group for row in fleet.rows("batches") for group in row["group_ids"]]
        assert len(groups) == len(set(groups)) == 8 * BATCHES
        assert curve(fleet)[-1] - curve(fleet)[0] > LEARNED
    spread = max(apart(curve(one), curve(other)) for one, other in combinations(fixed, 2))
    print(f"{apart(curve(moving), curve(fixed[0])):.3f} apart; other words {spread:.3f}")
    assert apart(curve(moving), curve(fixed[0])) <= spread + MARGIN
