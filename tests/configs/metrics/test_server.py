"""The pages of a process over real HTTP: figures, life and readiness, from threads of their own."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from socketserver import TCPServer
from urllib.error import HTTPError

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from configs.errors import SettingsError
from configs.metrics import Health, Histogram, Metric, Pulse
from configs.metrics_server import CALLER_S, MAX_CALLERS, MetricsServer
from configs.metrics_serving import serving
from configs.settings import RunSettings
from tests.learner.support.listening import without_files

METRICS = (
    Metric("nyala_x_depth", "gauge", "items", "Depth."),
    Metric("nyala_x_tokens_total", "counter", "tokens", "Tokens."),
    Metric("nyala_x_drops_total", "counter", "groups", "Drops.", label="reason"),
    Metric("nyala_x_wait_seconds", "histogram", "s", "Waits."),
    Metric("nyala_x_absent", "gauge", "1", "Has no value."),
)


class Role:
    """A process with figures that a test sets."""

    def __init__(self, folder, *, endpoint="http://127.0.0.1:0", limit_s=60.0, clock=None, **more):
        self.waits = Histogram((1.0, 5.0))
        self.waits_for = None
        self.pulse = Pulse(limit_s, clock=clock or time.monotonic)
        self.server = MetricsServer(
            "broker.metrics_endpoint",
            endpoint,
            METRICS,
            self.values,
            Health(self.pulse, lambda: self.waits_for),
            folder=folder,
            labels={"run": "r", "role": "broker", "name": "b"},
            **{"or_any_port": False, **more},
        ).start()
        self.base = self.server.url.removesuffix("/metrics")

    def values(self):
        return {
            "nyala_x_depth": 3,
            "nyala_x_tokens_total": 7.5,
            "nyala_x_drops_total": {"old": 2, "error": 1},
            "nyala_x_wait_seconds": self.waits,
            "nyala_x_absent": None,
        }

    def get(self, path):
        try:
            with urllib.request.urlopen(self.base + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture
def role(tmp_path):
    role = Role(tmp_path)
    yield role
    role.server.close()


def samples_of(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_page_has_the_figures_as_prometheus_reads_them(role):
    role.waits.observe(0.5)
    role.waits.observe(9.0)

    status, text = role.get("/metrics")

    assert status == 200
    found = samples_of(text)
    assert found["nyala_x_depth",] == 3
    assert found["nyala_x_tokens_total",] == 7.5
    assert found["nyala_x_drops_total", "old"] == 2
    assert found["nyala_x_wait_seconds_bucket", "1.0"] == 1
    assert found["nyala_x_wait_seconds_bucket", "5.0"] == 1
    assert found["nyala_x_wait_seconds_bucket", "+Inf"] == 2
    assert found["nyala_x_wait_seconds_sum",] == 9.5
    assert found["nyala_ready",] == 1
    assert found["process_resident_memory_bytes",] > 0
    assert not [name for name, *_ in found if name.startswith("nyala_x_absent")]


def test_the_registry_is_the_pages_own(role):
    """vLLM's figures are in the global one; two pages of a process must not meet either."""
    before = prometheus_client.generate_latest()

    assert b"nyala" not in before
    prometheus_client.Gauge(
        "nyala_x_depth", "of somebody else", registry=prometheus_client.REGISTRY
    )
    try:
        assert samples_of(role.get("/metrics")[1])["nyala_x_depth",] == 3
    finally:
        prometheus_client.REGISTRY.unregister(
            prometheus_client.REGISTRY._names_to_collectors["nyala_x_depth"]
        )


def test_an_event_loop_that_hangs_turns_livez_red_from_another_thread(tmp_path):
    seconds, answers = [0.0], []
    role = Role(tmp_path, limit_s=60, clock=lambda: seconds[0])

    async def hang():
        beats = asyncio.create_task(role.pulse.keep())
        await asyncio.sleep(0)  # the first beat
        answers.append(role.get("/livez"))
        seconds[0] = 61.0
        answers.append(role.get("/livez"))  # the loop stands still for it; the server does not
        beats.cancel()

    asyncio.run(hang())
    role.pulse.beat()
    answers.append(role.get("/livez"))
    role.server.close()

    red = "the loop has not turned for 61 s, limit 60 s\n"
    assert answers == [(200, "ok\n"), (503, red), (200, "ok\n")]


def test_readyz_names_what_a_process_waits_for(role):
    assert role.get("/readyz") == (200, "ok\n")

    role.waits_for = "its store"

    assert role.get("/readyz") == (503, "waits for its store\n")
    assert role.get("/livez")[0] == 200
    assert samples_of(role.get("/metrics")[1])["nyala_ready",] == 0


def test_what_its_callers_took_is_logged_at_the_end(tmp_path):
    with capture_logs() as logs:
        role = Role(tmp_path)
        for _ in range(3):
            role.get("/metrics")
        role.server.close()

    (pages,) = [line for line in logs if line["event"] == "pages"]
    assert pages["read"] == 3
    assert 0 < pages["cpu_s"] < 60


def test_another_path_is_not_found(role):
    assert role.get("/")[0] == 404


def test_a_taken_port_is_an_error_that_names_the_setting(role, tmp_path):
    with pytest.raises(SettingsError, match=r"broker\.metrics_endpoint must be an address of this"):
        Role(tmp_path, endpoint=role.base)


def test_one_more_actor_of_a_machine_takes_another_port(role, tmp_path):
    other = Role(tmp_path, endpoint=role.base, or_any_port=True)
    try:
        assert other.base != role.base
        assert other.get("/readyz")[0] == 200
    finally:
        other.server.close()


def test_prometheus_finds_the_address_in_the_runs_folder_while_it_is_served(tmp_path):
    (tmp_path / "metrics").mkdir()
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        dead = tmp_path / "metrics" / "killed.json"
        dead.write_text(json.dumps([{"targets": [f"127.0.0.1:{gone.getsockname()[1]}"]}]))
        elsewhere = tmp_path / "metrics" / "elsewhere.json"
        elsewhere.write_text(json.dumps([{"targets": ["192.0.2.1:9"]}]))

    role = Role(tmp_path)

    (file,) = tmp_path.glob("metrics/b-*.json")
    assert json.loads(file.read_text()) == [
        {
            "targets": [role.base.removeprefix("http://")],
            "labels": {"run": "r", "role": "broker", "name": "b"},
        }
    ]
    assert not dead.exists()
    assert elsewhere.exists()
    role.server.close()
    assert not file.exists()


def test_callers_that_say_nothing_keep_no_more_than_their_places(role):
    host, port = role.base.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), timeout=30) for _ in range(MAX_CALLERS + 1)]
    try:
        idle[0].settimeout(CALLER_S / 2)  # sooner than who says nothing is cut anyway
        assert idle[0].recv(1) == b""
    finally:
        for each in idle:
            each.close()


def test_a_caller_for_whom_no_file_is_left_is_served_later_and_takes_no_processor(
    role, monkeypatch
):
    tries = []
    accept = TCPServer.get_request

    def counted(server):
        tries.append(server)
        return accept(server)

    monkeypatch.setattr(TCPServer, "get_request", counted)
    host, port = role.base.removeprefix("http://").split(":")
    with socket.socket() as caller:
        caller.settimeout(0.3)
        with without_files():
            caller.connect((host, int(port)))
            caller.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            with pytest.raises(TimeoutError):
                caller.recv(64)
            assert len(tries) == 1
        caller.settimeout(30)
        assert caller.recv(64).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("request_line", [b"", b"GET /metrics HTTP/1.0\r\n\r\n", b"GET /metr"])
def test_a_probe_is_answered_at_once_beside_forty_slow_readers(tmp_path, request_line):
    role = Role(tmp_path)
    page = b"# " + bytes(2**23)  # more than the buffers of a connection take
    host, port = role.base.removeprefix("http://").split(":")
    slow = []
    try:
        with pytest.MonkeyPatch.context() as patches, capture_logs() as logs:
            patches.setattr("configs.metrics_server.generate_latest", lambda _registry: page)
            for _ in range(40):
                slow.append(socket.create_connection((host, int(port)), timeout=30))
                slow[-1].sendall(request_line)
            began = time.monotonic()
            assert [role.get(path)[0] for path in ("/livez", "/readyz")] == [200, 200]
            took_s = time.monotonic() - began
        assert took_s < 1.0
        assert len(logs) <= MAX_CALLERS
    finally:
        for each in slow:
            each.close()
        role.server.close()


def test_without_an_endpoint_nothing_is_imported(tmp_path):
    program = (
        "import sys; from configs.metrics_serving import serving\n"
        "with serving(None, (), dict, None, run=None, role='broker', name='b'): pass\n"
        "sys.exit('prometheus_client' in sys.modules or 'http.server' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3], timeout=60
    )

    assert done.returncode == 0


def test_a_role_serves_under_its_setting(tmp_path):
    run = RunSettings(name="r", directory=tmp_path, model="init")
    health = Health(Pulse(60), lambda: None)
    with serving(
        "http://127.0.0.1:0", METRICS, dict, health, run=run, role="actors", name="actor-0"
    ):
        (file,) = (tmp_path / "r" / "metrics").glob("actor-0-*.json")
        (target,) = json.loads(file.read_text())
    assert target["labels"] == {"run": "r", "role": "actor", "name": "actor-0"}
    assert not file.exists()
