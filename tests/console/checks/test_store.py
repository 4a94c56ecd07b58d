"""Faults of a Redis that a user names: each by a real server that is set up so."""

from __future__ import annotations

import pytest
import redis

from buffer.client import server_state
from buffer.client.server_identity import Server
from buffer.client.server_state import read_server_state
from configs.errors import NyalaError, SettingsError
from configs.settings import BufferSettings, RunSettings
from console.run.checks.check import CheckWarning
from console.run.checks.store import store_checks
from tests.buffer.support.servers import server
from tests.waiting import wait_until

RUN = RunSettings(model="init", environment="calculator")
GOOD = 'save ""\nappendonly yes\nmaxmemory 2gb\nmaxmemory-policy noeviction\n'


def looked_at(url: str, name: str, buffer: BufferSettings | None = None) -> str | CheckWarning:
    checks = {check.name: check for check in store_checks(RUN, buffer or BufferSettings(), url)}
    return checks[name].look()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that is as it should be; tests change it while it runs, and back."""
    with server(tmp_path_factory.mktemp("redis") / "good", GOOD) as (_, port):
        with redis.Redis(port=port) as client:
            wait_until(client.ping, ignoring=redis.RedisError)
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture
def change(url):
    """Set a setting of the server for the length of a test."""
    with redis.Redis.from_url(url) as client:
        before: dict[str, str] = {}

        def set_to(name: str, value: str) -> None:
            before.setdefault(name, client.config_get(name)[name])
            client.config_set(name, value)

        yield set_to
        for name, value in before.items():
            client.config_set(name, value)


def test_a_good_server_passes_with_its_figures(url):
    found = {each.name: each.look() for each in store_checks(RUN, BufferSettings(), url)}

    assert found["eviction"] == "noeviction"
    assert found["durability"] == "append-only file on, last write worked"
    assert "of 2.0 GiB used" in found["memory"]
    assert str(found["version"]).split()[0] in {"Redis", "Valkey"}


def test_a_server_that_evicts_fails(url, change):
    change("maxmemory-policy", "allkeys-lru")

    with pytest.raises(SettingsError, match=r"must be noeviction, got allkeys-lru.*CONFIG SET"):
        looked_at(url, "eviction")


def test_a_server_without_an_append_only_file_fails(url, change):
    change("appendonly", "no")

    with pytest.raises(SettingsError, match="appendonly of the Redis server must be yes, got no"):
        looked_at(url, "durability")


@pytest.mark.slow
def test_too_little_memory_fails_and_none_or_a_full_one_is_warned_of(url, change):
    change("maxmemory", "16mb")
    with pytest.raises(SettingsError, match=r"maxmemory must hold .* got 16 MiB; raise it"):
        looked_at(url, "memory")

    change("maxmemory", "0")
    assert "should be set, got none" in str(looked_at(url, "memory"))

    change("maxmemory", "2gb")
    with redis.Redis.from_url(url) as client:
        client.set("large", bytes(200 * 2**20))
        change("maxmemory", "300mb")
        small = BufferSettings(max_uncommitted_bytes=2**20, pause_at_memory=0.6)
        full = looked_at(url, "memory", small)
        client.delete("large")
    assert isinstance(full, CheckWarning)
    assert "no lease is granted; raise its maxmemory" in full.text


def test_a_server_older_than_our_commands_fails(url, monkeypatch):
    monkeypatch.setattr(server_state, "server_of_info", lambda _: Server("redis", (6, 0, 9)))

    with pytest.raises(SettingsError, match=r"must be Redis 6\.2 or newer.* got Redis 6\.0\.9"):
        looked_at(url, "version")


def test_the_console_is_told_of_an_old_server_too(url, monkeypatch):
    monkeypatch.setattr(server_state, "server_of_info", lambda _: Server("redis", (6, 2, 14)))

    found = looked_at(url, "version")

    assert isinstance(found, CheckWarning)
    assert "at least Redis 8.6.3 or Valkey 9.1.1" in found.text


def test_a_clock_that_is_ahead_is_measured_to_half_a_round_trip(url):
    ticks = iter([100.0, 100.2, 200.0, 200.1, 300.0, 300.4])
    with redis.Redis.from_url(url) as client:
        now = client.time()[0]

    offset = read_server_state(url, clock=lambda: next(ticks)).clock

    assert offset.within_s == pytest.approx(0.05)
    assert offset.ahead_s == pytest.approx(now - 200.05, abs=30)
    assert offset.least_s == offset.ahead_s - offset.within_s


def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(NyalaError, match="cannot be reached"):
        read_server_state("redis://127.0.0.1:1/0")
