"""A learner on two machines, which are two networks of this one; one of them is killed.

Run beside CI, `pytest tests/system/two_machines.py`: it needs root and the `ip` command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from broker.transport.keys import make_keys
from buffer import operations
from buffer.store import Store
from configs.errors import StoreError
from configs.loader import save
from configs.settings import Settings
from lab.faults.network import SecondNetwork, obstacle
from tests.learner.support.listening import listening
from tests.learner.support.made_episodes import answers_at
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import answer_leases, tiny_settings
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
PORT = 29400
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(4 * PATIENCE_S),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]


class TwoMachines:
    """The launchers of both, and actors that answer at random."""

    def __init__(self, settings: Settings, url: str, network: SecondNetwork) -> None:
        self.settings, self.url, self.network = settings, url, network
        self.processes: list[subprocess.Popen[bytes]] = []
        self._done = threading.Event()
        self._actor = threading.Thread(target=self._act)
        self._actor.start()

    def start(self, node: int) -> subprocess.Popen[bytes]:
        """Start the launcher of a machine, in a process group of its own."""
        inside = ["ip", "netns", "exec", self.network.name] if node else []
        where = ["--nodes", "2", "--node-rank", str(node)]
        where += ["--rendezvous", f"{self.network.here}:{PORT}"]
        folder = self.settings.run.folder
        with (folder / f"log-{len(self.processes)}").open("wb") as log:
            process = subprocess.Popen(
                [*inside, sys.executable, "-m", "learner", "--config", "config.yaml", *where],
                cwd=folder,
                env={
                    **os.environ,
                    "NYALA_REDIS_URL": self.url,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                },
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def version(self) -> int:
        """Batches that are trained."""
        with Store(self.url, self.settings.run.name) as store:
            try:
                return store.run(operations.stats()).version
            except StoreError:  # nobody has entered the run yet
                return -1

    def wait_for(self, step: int) -> None:
        """Wait until batch `step` is trained."""
        wait_until(lambda: self.version() >= step, self.logs, timeout_s=PATIENCE_S, every_s=0.1)

    def logs(self) -> str:
        """What the launchers and their ranks wrote."""
        folder = self.settings.run.folder
        return "\n".join(path.read_text() for path in sorted(folder.glob("log-*")))

    def close(self) -> None:
        """End all."""
        self._done.set()
        self._actor.join()
        for process in self.processes:
            kill(process)

    def _act(self) -> None:
        with Store(self.url, self.settings.run.name) as store:
            while not self._done.wait(0.1):
                try:
                    publication = store.run(operations.publication())
                    if publication is not None:
                        version = publication.version
                        answer_leases(store, version, answers_at(version))
                except StoreError:
                    continue


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher with its ranks, as a machine that loses power."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def machines(redis_url: str, tmp_path: Path) -> Iterator[TwoMachines]:
    """Two machines of one rank each; one of them will do."""
    settings = tiny_settings(
        tmp_path,
        run={"steps": 8, "trusted_network": True},
        learner={"broadcast": False, "min_ranks": 1, "checkpoint_every": 1},
    )
    save_tiny_model(Path(settings.run.model_path))
    make_keys(settings.run.folder / "keys")
    save(settings, settings.run.folder / "config.yaml")
    with SecondNetwork() as network, redis.Redis.from_url(redis_url) as server:
        server.config_set("bind", f"127.0.0.1 {network.here}")
        running = TwoMachines(settings, redis_url.replace("127.0.0.1", network.here), network)
        try:
            yield running
        finally:
            running.close()
            server.config_set("bind", "127.0.0.1")


def test_a_machine_is_lost_and_the_run_goes_on_without_it(machines: TwoMachines) -> None:
    zero, one = machines.start(0), machines.start(1)
    machines.wait_for(2)
    assert listening(zero.pid) <= {"127.0.0.1", machines.network.here}
    assert listening(one.pid) <= {"127.0.0.1", machines.network.there}

    kill(one)
    machines.wait_for(5)
    assert "continuing without the lost nodes" in machines.logs()

    assert zero.wait(PATIENCE_S) == 0, machines.logs()
    folder = machines.settings.run.folder
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 9)]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 8 and summary["learner_lives"] == 2


def test_a_machine_that_comes_back_resumes_with_both(machines: TwoMachines) -> None:
    zero, one = machines.start(0), machines.start(1)
    machines.wait_for(2)

    kill(one)
    again = machines.start(1)
    machines.wait_for(5)

    assert "continuing without" not in machines.logs()
    assert [zero.wait(PATIENCE_S), again.wait(PATIENCE_S)] == [0, 0], machines.logs()
