"""The services of compose.yaml, as plain processes: their exact commands train a run to its end.

What a container engine would do is done by hand: each service gets its own folder for
/run/secrets and /srv/nyala/keys with the secrets that it declares and no others, its own
environment, and loopback ports for the names of the other services; the volume of registered keys
is a folder that services share. Images, other volumes and the network stay untried.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import find_redis_server
from tests.packaging.support.compose_file import ROOT, load_compose, secrets_of

ACTORS = 4
PATIENCE_S = 180.0  # importing torch takes a minute where the cores are shared


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Host:
    """What stands for the container engine: one working folder, one set of ports."""

    folder: Path
    services: dict[str, Any]
    secret_files: dict[str, dict[str, str]]
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
            key: self._here(name, value) for key, value in service.get("environment", {}).items()
        }
        self._mount_secrets(name)
        container = name if replica == 1 else f"{name}-{replica}"
        with self._log(container).open("wb") as log:
            self.started[container] = subprocess.Popen(
                command, cwd=self.folder, env=self._base() | environment, stdout=log, stderr=log
            )
        return self.started[container]

    @property
    def registered(self) -> Path:
        """The volume of registered keys."""
        return self.folder / "registered"

    def is_healthy(self, name: str) -> bool:
        """Run the service's own health check."""
        test = [
            self._here(name, argument) for argument in self.services[name]["healthcheck"]["test"]
        ]
        return self._run(test[1:]) == 0

    def wait_until_healthy(self, name: str) -> None:
        self.wait(lambda: self.is_healthy(name), name)

    def wait(self, done: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{name} is late:\n{self.log(name)}"
            time.sleep(0.2)

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
        here = text.replace("/run/secrets", str(self.folder / "mounted" / name))
        here = here.replace("/srv/nyala/keys", str(self.folder / "mounted" / name / "keys"))
        here = here.replace("/srv/nyala/", f"{self.folder}/")
        here = here.replace("/etc/nyala/redis.conf", str(self._redis_conf()))
        for host in ("0.0.0.0", "broker"):
            for port, ours in self.ports.items():
                here = here.replace(f"//{host}:{port}", f"//127.0.0.1:{ours}")
        return here if here not in map(str, self.ports) else str(self.ports[int(here)])

    def _redis_conf(self) -> Path:
        text = (ROOT / "configs" / "deploy" / "redis.conf").read_text()
        data = self.folder / "redis"
        data.mkdir(exist_ok=True)
        text = text.replace("/data", str(data)).replace("bind * -::*", "bind 127.0.0.1")
        text = text.replace("port 6379", f"port {self.ports[6379]}")
        text = text.replace("/run/secrets", str(self.folder / "mounted" / "redis"))
        path = self.folder / "redis.conf"
        path.write_text(text)
        return path

    def _mount_secrets(self, name: str) -> None:
        for volume in self.services[name].get("volumes", []):
            source, _, target = volume.partition(":")
            if source == "registered" or source.startswith("./secrets/keys/"):
                place = Path(self._here(name, target.removesuffix(":ro")))
                place.parent.mkdir(parents=True, exist_ok=True)
                (self.folder / source).mkdir(exist_ok=True)
                if not place.exists():
                    place.symlink_to(self.folder / source)
        for source, target in secrets_of(self.services[name]).items():
            path = Path(self._here(name, target))
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / self.secret_files[source]["file"], path)
            if source == "redis.url":
                url = path.read_text().replace("@redis:6379", f"@127.0.0.1:{self.ports[6379]}")
                path.write_text(url)

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
            command, cwd=self.folder, env=self._base(), capture_output=True, check=False, timeout=30
        )
        return done.returncode


@pytest.fixture
def host(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "bin").mkdir()
    nyala = tmp_path / "bin" / "nyala"  # the console script, where only the sources are on the path
    nyala.write_text(f"#!{sys.executable}\nfrom console.main import app\napp()\n")
    nyala.chmod(0o755)
    document = load_compose(NYALA_CONFIG="configs/tiny.yaml")
    host = Host(tmp_path, document["services"], document["secrets"])
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
        for line in (host.folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert len(list(host.registered.glob("enrolment/enrolment-*.pub"))) == ACTORS
    for actor in actors:
        actor.terminate()
    assert [actor.wait(60) for actor in actors] == [0] * ACTORS, host.log("actor")


def test_what_make_secrets_wrote_stays_and_is_closed_to_others(host):
    for _ in range(2):
        assert host.up("secrets").wait(60) == 0, host.log("secrets")
        files = {path: path.read_text() for path in (host.folder / "secrets").rglob("*.*")}
        host.folder.joinpath("secrets").chmod(0o755)  # the second time closes it again

    assert host.up("secrets").wait(60) == 0
    assert {path: path.read_text() for path in files} == files
    assert (host.folder / "secrets").stat().st_mode & 0o077 == 0
    assert (host.folder / "secrets" / "redis.url").stat().st_mode & 0o077 == 0
    for source in host.secret_files.values():
        assert (host.folder / source["file"]).is_file()
