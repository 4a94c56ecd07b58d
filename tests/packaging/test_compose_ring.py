"""The services of compose.yaml, as plain processes: their exact commands train a run to its end.

What a container engine would do is done by hand: a volume is a folder, which each service that
mounts it finds at its place in a root of its own; its own environment, and loopback ports for the
names of the other services. Images, read-only mounts and the network are tests/containers' matter.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from console.run.redis_server import free_port
from console.verbs.status import status_of
from tests.conftest import find_redis_server
from tests.packaging.support.compose_file import ROOT, load_compose, mounts_of
from tests.waiting import wait_until

ACTORS = 4
PATIENCE_S = 180.0  # importing torch takes a minute where the cores are shared


@dataclass
class Host:
    """What stands for the container engine: one working folder, one set of ports."""

    folder: Path
    services: dict[str, Any]
    ports: dict[int, int] = field(
        default_factory=lambda: {port: free_port() for port in (5757, 5758, 6379, 9470, 9471, 9480)}
    )
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def up(self, name: str, *, replica: int = 1) -> subprocess.Popen[bytes]:
        """Start a service as compose.yaml says, or one more container of it."""
        service = self.services[name]
        command = [self._here(name, argument) for argument in service["command"]]
        if command[0] == "redis-server":
            command[0] = find_redis_server()
        environment = {
            key: self._here(name, value)
            for key, value in service.get("environment", {}).items()
            if value is not None  # that of whoever types the command, which has none here
        }
        self._mount(name)
        container = name if replica == 1 else f"{name}-{replica}"
        with self._log(container).open("wb") as log:
            self.started[container] = subprocess.Popen(
                command, cwd=self.root(name), env=self._base() | environment, stdout=log, stderr=log
            )
        return self.started[container]

    def volume(self, name: str) -> Path:
        """The folder that stands for a volume."""
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def root(self, name: str) -> Path:
        """What stands for `/` and `/srv/nyala` of a service, with its mounts."""
        path = self.folder / "roots" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def is_healthy(self, name: str) -> bool:
        """Run the service's own health check."""
        test = [
            self._here(name, argument) for argument in self.services[name]["healthcheck"]["test"]
        ]
        return self._run(test[1:]) == 0

    def wait_until_healthy(self, name: str) -> None:
        self.wait(lambda: self.is_healthy(name), name)

    def wait(self, done: Callable[[], bool], name: str) -> None:
        wait_until(
            done, lambda: f"{name} is late:\n{self.log(name)}", timeout_s=PATIENCE_S, every_s=0.2
        )

    def log(self, name: str) -> str:
        return self._log(name).read_text()[-4000:]

    def down(self) -> None:
        for process in reversed(self.started.values()):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _here(self, name: str, text: str) -> str:
        """Turn the names of compose's world into those of this host."""
        root = self.root(name)
        here = text.replace("/srv/nyala/", f"{root}/").replace("/run/nyala", f"{root}/run-nyala")
        here = here.replace("/etc/nyala/redis.conf", str(root / "redis.conf"))
        for host in ("0.0.0.0", "broker"):
            for port, ours in self.ports.items():
                here = here.replace(f"//{host}:{port}", f"//127.0.0.1:{ours}")
        return here if here not in map(str, self.ports) else str(self.ports[int(here)])

    def _mount(self, name: str) -> None:
        """Put a service's volumes, and the files of its image, at their places."""
        root = self.root(name)
        if not (root / "configs").exists():
            (root / "configs").symlink_to(ROOT / "configs")
        for target, (source, _) in sorted(mounts_of(self.services[name]).items()):
            place = Path(self._here(name, target))
            if target == "/data" or target.startswith("/home") or place.is_symlink():
                continue
            if place.is_dir():
                place.rmdir()  # a mount hides what was there
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(ROOT / source if source.startswith("./") else self.volume(source))
        url = root / "keys" / "redis.url"
        if url.exists():
            text = url.read_text().replace("@redis:6379", f"@127.0.0.1:{self.ports[6379]}")
            url.write_text(text)
        if name == "redis":
            (root / "redis.conf").write_text(self._redis_conf(root))

    def _redis_conf(self, root: Path) -> str:
        text = (ROOT / "configs" / "deploy" / "redis.conf").read_text()
        text = text.replace("/data", str(self.volume("redis"))).replace(
            "bind * -::*", "bind 127.0.0.1"
        )
        text = text.replace("port 6379", f"port {self.ports[6379]}")
        return text.replace("/run/nyala", f"{root}/run-nyala")

    def _base(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _run(self, command: list[str]) -> int:
        done = subprocess.run(
            command, cwd=ROOT, env=self._base(), capture_output=True, check=False, timeout=30
        )
        return done.returncode


@pytest.fixture
def host(tmp_path):
    (tmp_path / "bin").mkdir()
    nyala = tmp_path / "bin" / "nyala"  # the console script, where only the sources are on the path
    nyala.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "from console.main import app; app()" "$@"\n'
    )
    nyala.chmod(0o755)
    host = Host(tmp_path, load_compose(NYALA_CONFIG="work/tiny.yaml")["services"])
    yield host
    host.down()


@pytest.mark.live
@pytest.mark.timeout(600)
def test_the_services_with_four_actors_train_a_run_to_its_end(host):
    for once in ("secrets", "model"):
        assert host.up(once).wait(PATIENCE_S) == 0, host.log(once)

    host.up("redis")
    host.wait(lambda: b"Ready to accept" in (host.folder / "redis.log").read_bytes(), "redis")
    host.up("broker")
    host.wait_until_healthy("broker")
    learner = host.up("learner")
    actors = [host.up("actor", replica=number) for number in range(1, ACTORS + 1)]
    host.wait(lambda: learner.poll() is not None or host.is_healthy("learner"), "learner")
    host.wait(lambda: learner.poll() is not None or host.is_healthy("actor"), "actor")
    host.wait(lambda: learner.poll() is not None, "learner")

    assert learner.returncode == 0, host.log("learner")
    steps = [
        json.loads(line)["step"]
        for line in (host.volume("runs") / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    registered = list(host.volume("allowed").glob("actor/enrolment/enrolment-*.pub"))
    assert len(registered) == ACTORS
    assert status_of(host.volume("runs") / "tiny")["state"] == "finished"  # as `nyala status` does
    for actor in actors:
        actor.terminate()
    assert [actor.wait(60) for actor in actors] == [0] * ACTORS, host.log("actor")


def test_what_make_secrets_wrote_stays_and_each_service_gets_its_own(host):
    assert host.up("secrets").wait(60) == 0, host.log("secrets")
    files = written(host)

    assert host.up("secrets").wait(60) == 0, host.log("secrets")

    assert written(host) == files
    assert set(files) == {
        "broker-keys/broker.key",
        "broker-keys/broker.pub",
        "broker-keys/learner.pub",
        "broker-keys/redis.url",
        "learner-keys/learner.key",
        "learner-keys/broker.pub",
        "learner-keys/learner.pub",
        "learner-keys/redis.url",
        "actor-keys/enrolment.key",
        "actor-keys/broker.pub",
        "allowed/enrolment/enrolment.pub",
        "redis-password/redis_auth.conf",
    }
    password = files["redis-password/redis_auth.conf"].split()[1]
    assert f":{password}@redis:" in files["learner-keys/redis.url"]
    for name in files.keys() - {"redis-password/redis_auth.conf"}:
        path = host.folder / "volumes" / name
        assert path.stat().st_mode & 0o077 == 0, name


def test_secrets_that_were_not_finished_are_made_anew(host):
    assert host.up("secrets").wait(60) == 0, host.log("secrets")
    before = written(host)
    (host.volume("redis-password") / "redis_auth.conf").unlink()

    assert host.up("secrets").wait(60) == 0, host.log("secrets")

    assert written(host).keys() == before.keys()
    assert written(host)["broker-keys/broker.key"] != before["broker-keys/broker.key"]


def written(host):
    volumes = host.folder / "volumes"
    return {
        str(path.relative_to(volumes)): path.read_text()
        for path in volumes.rglob("*")
        if path.is_file()
    }
