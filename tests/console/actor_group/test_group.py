"""`nyala actor --count 2` on a CPU: real actors, which look for a broker that is not there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from console.run.redis_server import free_port
from tests.broker.support.keys import keys_with_actor
from tests.waiting import is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
NYALA = "from console.main import app; app()"


class Group:
    """The command, in a folder of its own."""

    def __init__(self, folder: Path, **actors: object) -> None:
        self.folder = folder
        tree = {
            "run": {"name": "far", "model": "init", "environment": "calculator"},
            "broker": {
                "endpoint": f"tcp://127.0.0.1:{free_port()}",
                "keys": str(keys_with_actor(folder / "keys")),
            },
            "actors": {"engine": "torch", **actors},
        }
        (folder / "far.yaml").write_text(yaml.safe_dump(tree))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-c", NYALA, "actor", "far.yaml", "--count", "2"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def logs(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("runs/far/logs/*.log"))]

    def wait_until_they_look(self, times: int = 2) -> None:
        def looked() -> int:
            return sum(text.count("looking for the broker") for text in self.logs())

        wait_until(lambda: looked() >= times, timeout_s=90.0)

    def actors(self) -> list[int]:
        """Process ids of the actors, in the order of their names."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = re.search(r"^PPid:\t(\d+)", (entry / "status").read_text(), re.MULTILINE)
            except OSError:  # it has just ended
                continue
            if parent and int(parent[1]) == self.process.pid and "--name" in words:
                found[words[words.index("--name") + 1]] = int(entry.name)
        return [found[name] for name in sorted(found)]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path, exit_when_told=75)
    yield group
    group.process.kill()
    group.process.communicate()


def test_they_are_kept_up_and_all_drain_at_ctrl_c(started: Group) -> None:
    started.wait_until_they_look()
    first, second = started.actors()
    os.kill(first, signal.SIGKILL)
    started.wait_until_they_look(times=3)
    again, other = started.actors()
    assert again != first
    assert other == second

    started.process.send_signal(signal.SIGINT)
    written, _ = started.process.communicate(timeout=60)

    assert started.process.returncode == 75, written
    assert "was killed by signal 9 (out of memory?); it starts again in" in written
    assert not is_alive(again)
    assert not is_alive(other)
    assert all('"stopped"' in text or "stopped" in text for text in started.logs())


def test_settings_that_no_actor_can_have_end_all_with_the_code_of_settings(tmp_path: Path) -> None:
    group = Group(tmp_path)
    (tmp_path / "keys" / "broker.pub").unlink()

    written, _ = group.process.communicate(timeout=90)

    assert group.process.returncode == 2, written
    assert "needs something changed first: " in written
