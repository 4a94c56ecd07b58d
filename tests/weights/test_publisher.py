"""The publisher process: command line, endpoint, and the thread that watches it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import ValidationError

from broker.transport.keys import make_keys
from broker.transport.sockets import advertised, host_and_port, reachable
from configs.errors import LostLineage, WeightsError
from learner.weights import sidecar
from learner.weights.publisher_process import PublisherSettings, parse
from learner.weights.sidecar import Sidecar
from tests.learner.support.listening import listening
from tests.needs import needs
from tests.system.support.own_network import OwnNetwork
from tests.waiting import wait_until
from tests.weights.support.plane import Plane

pytestmark = pytest.mark.slow

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
    for changes in ({}, {"broadcast": True, "sparse": False}):
        assert parse(settings(tmp_path, **changes).argument()) == settings(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"join_s": "soon"}, r"Expected `float`, got `str` - at `\$.join_s`"),
        ({"colour": "red"}, "contains unknown field `colour`"),
        ({"slots": 3}, r"at `\$.slots`"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path, changes, problem):
    argument = json.dumps({**json.loads(settings(tmp_path).argument()), **changes})

    with pytest.raises(ValidationError, match=problem):
        parse(argument)


def test_a_publisher_on_all_interfaces_names_one_that_others_can_reach():
    for reached in ("tcp://127.0.0.1:5", "tcp://[::1]:5"):
        assert reachable(reached) == reached
    host, port = host_and_port(reachable("tcp://0.0.0.0:5"))
    assert host not in ("", "0.0.0.0")
    assert port == 5


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("hub", "tcp://hub:5"),
        ("hub.example.org:7", "tcp://hub.example.org:7"),
        ("[::1]", "tcp://[::1]:5"),
        ("[::1]:7", "tcp://[::1]:7"),
    ],
)
def test_a_publisher_names_the_address_that_it_is_given(address, endpoint):
    assert advertised("tcp://0.0.0.0:5", address) == endpoint


@needs("namespaces")
def test_a_publisher_with_a_name_needs_no_route_out_of_its_network(tmp_path):
    network = OwnNetwork(tmp_path, route=False)
    try:
        named = _first_line(tmp_path, network, endpoint="tcp://0.0.0.0:0", advertise="hub:5758")
        assert json.loads(named)["endpoint"] == "tcp://hub:5758"

        nameless = _first_line(tmp_path, network, endpoint="tcp://0.0.0.0:0")
        assert "must have a default route to find its own address" in nameless
        assert "learner.advertise" in nameless
    finally:
        network.close()


def _first_line(folder: Path, network: OwnNetwork, **changes) -> str:
    """Start a publisher in a network; where it listens, or why it ended."""
    make_keys(folder / "keys")
    with subprocess.Popen(
        [
            *network.inside,
            sys.executable,
            "-m",
            "learner.weights.publisher_process",
            settings(folder, **changes).argument(),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        _, errors = process.communicate(timeout=60)
    return line or errors


def test_actors_reach_a_publisher_where_it_says_also_after_its_death(tmp_path):
    plane = Plane(tmp_path, publisher_endpoint="tcp://0.0.0.0:0", advertise="127.0.0.3")
    try:
        plane.publish()
        host, _ = host_and_port(endpoint := plane.publication.endpoint)
        actor = plane.actor("elsewhere", timeout_s=30.0)
        actor.wait("synced", timeout_s=60.0)
        os.kill(plane.publisher_pid, signal.SIGKILL)
        newest = plane.publish()
        assert actor.applied(newest, timeout_s=30.0)["digest"] == newest.digest
        again, addresses = plane.publication.endpoint, listening(plane.publisher_pid)
    finally:
        plane.close()
    assert host == "127.0.0.3"
    assert again == endpoint
    assert addresses == {"0.0.0.0"}, "it listens as before"


def test_the_publisher_ends_with_its_stdin_and_not_when_all_processes_are_told_to(tmp_path):
    make_keys(tmp_path / "keys")
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "learner.weights.publisher_process",
            settings(tmp_path).argument(),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "listening"

        process.terminate()  # its learner is told too, and decides when both end
        for _ in range(2):  # the first may have been on its way
            assert json.loads(process.stdout.readline() or "{}") == {"event": "alive"}
        process.communicate(timeout=20)

    assert process.returncode == 0


def test_the_publisher_inherits_what_it_is_given_and_serves_on_uvloop(tmp_path):
    make_keys(tmp_path / "keys")
    watched = Sidecar(
        settings(tmp_path),
        on_death=lambda: None,
        on_line=lambda line: None,
        environment={"KEPT": "lo", "OMP_NUM_THREADS": "8"},
    )
    watched.start()
    try:
        environment = Path(f"/proc/{watched.pid}/environ").read_bytes().split(b"\0")
        libraries = Path(f"/proc/{watched.pid}/maps").read_text()
    finally:
        watched.close()

    assert {b"KEPT=lo", b"OMP_NUM_THREADS=1"} == set(environment) - {b""}
    assert "uvloop" in libraries


def test_a_publisher_that_cannot_start_is_an_error_and_not_a_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(sidecar, "MAX_RESTARTS", 1)
    make_keys(tmp_path / "keys")
    broken = settings(tmp_path, endpoint="tcp://192.0.2.1:1")  # not an address of this machine

    watched = Sidecar(broken, on_death=lambda: None, on_line=lambda line: None)

    with pytest.raises(
        WeightsError,
        match="must run, got one that died more than 1 times, the last time because it has ended",
    ):
        watched.start()


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Makes a started sidecar, which is closed at the end; its lines are kept."""
    monkeypatch.setattr(sidecar, "START_TIMEOUT_S", 15.0)
    make_keys(tmp_path / "keys")
    started = []

    def start(on_line):
        watched = Sidecar(settings(tmp_path), on_death=lambda: None, on_line=on_line)
        started.append(watched)
        watched.start()
        return watched

    yield start
    for watched in started:
        watched.close()


def test_a_line_that_is_no_report_is_ignored(tmp_path, monkeypatch, watch):
    talkative = tmp_path / "python"  # as a library would be that prints to stdout
    talkative.write_text(
        f'#!/bin/sh\necho "no JSON"\necho "[1]"\necho "{{}}"\nexec "{sys.executable}" "$@"\n'
    )
    talkative.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(talkative))
    lines: list[dict] = []

    watched = watch(lines.append)

    watched.check_publisher()
    assert [line["event"] for line in lines] == ["listening"]


def test_a_publisher_that_cannot_be_started_for_a_moment_is_started_later(monkeypatch, watch):
    lines: list[dict] = []
    watched = watch(lines.append)
    python = sys.executable
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    os.kill(watched.pid, signal.SIGKILL)
    wait_until(lambda: watched.pid == 0)
    time.sleep(0.1)  # it has tried
    monkeypatch.setattr(sys, "executable", python)

    wait_until(lambda: len(lines) == 2)
    watched.check_publisher()


def test_a_publisher_that_can_never_be_started_is_an_error(monkeypatch, watch):
    monkeypatch.setattr(sidecar, "MAX_RESTARTS", 1)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    with pytest.raises(WeightsError, match=r"time because it cannot be started: .*No such file"):
        watch(lambda line: None)


def test_what_ends_the_watch_is_raised_at_the_next_check(watch):
    def refuse(line):
        raise LostLineage("a newer learner has taken over")

    with pytest.raises(LostLineage, match="newer learner"):
        watch(refuse)
