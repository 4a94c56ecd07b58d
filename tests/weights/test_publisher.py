"""The publisher's command line, and where it says that it listens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from broker.transport.keys import make_keys
from broker.weights.port import host_and_port, reachable
from configs.errors import WeightsError
from learner.weights import sidecar
from learner.weights.publisher_process import PublisherSettings, parse
from learner.weights.sidecar import Sidecar

ROOT = Path(__file__).parents[2]


def settings(folder: Path, **changes) -> PublisherSettings:
    fields = {
        "run": "toy",
        "slots": folder,
        "keys": folder / "keys",
        "endpoint": "tcp://127.0.0.1:0",
        "broadcast": False,
        "join_s": 1.5,
        "send_s": 2.5,
        "use_cuda": True,
        "sparse": True,
    }
    return PublisherSettings(**{**fields, **changes})


def test_the_command_line_says_all_settings(tmp_path):
    assert parse(settings(tmp_path).arguments()) == settings(tmp_path)


def test_a_publisher_on_all_interfaces_names_one_that_others_can_reach():
    for reached in ("tcp://127.0.0.1:5", "tcp://[::1]:5"):
        assert reachable(reached) == reached
    host, port = host_and_port(reachable("tcp://0.0.0.0:5"))
    assert host not in ("", "0.0.0.0")
    assert port == 5


def test_the_publisher_ends_with_its_stdin(tmp_path):
    make_keys(tmp_path / "keys")
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "learner.weights.publisher_process",
            *settings(tmp_path).arguments(),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "listening"

        process.communicate(timeout=20)

    assert process.returncode == 0


def test_the_publisher_does_not_inherit_the_ranks_interface(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.setenv("KEPT", "lo")
    make_keys(tmp_path / "keys")
    watched = Sidecar(settings(tmp_path), on_death=lambda: None, on_line=lambda line: None)
    watched.start()
    try:
        environment = Path(f"/proc/{watched.pid}/environ").read_bytes().split(b"\0")
    finally:
        watched.close()

    assert b"KEPT=lo" in environment
    assert not [entry for entry in environment if b"SOCKET_IFNAME" in entry]


def test_a_publisher_that_cannot_start_is_an_error_and_not_a_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(sidecar, "MAX_RESTARTS", 1)
    make_keys(tmp_path / "keys")
    broken = settings(tmp_path, endpoint="tcp://192.0.2.1:1")  # not an address of this machine

    watched = Sidecar(broken, on_death=lambda: None, on_line=lambda line: None)

    with pytest.raises(WeightsError, match="must start, but it died 1 times, last: it has ended"):
        watched.start()
