"""Versions of servers: what servers say of themselves, and what follows."""

import asyncio

import pytest
import redis
import structlog

from buffer import operations
from buffer.client import server_identity
from buffer.client.server_identity import (
    Server,
    is_safe,
    server_of_banner,
    server_of_info,
    warning_about,
)
from buffer.store import AsyncStore, Store
from configs.errors import StoreUnfit, exit_code
from tests.buffer.support.servers import server_in_cluster_mode


def test_valkey_is_judged_by_its_own_version_and_not_as_the_redis_it_calls_itself():
    info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"}

    server = server_of_info(info)

    assert server == Server("valkey", (9, 1, 2))
    assert not is_safe(Server("redis", (7, 2, 4)))
    assert is_safe(server)


@pytest.mark.parametrize(
    ("server", "safe"),
    [
        (Server("redis", (7, 0, 15)), False),
        (Server("redis", (8, 6, 2)), False),
        (Server("redis", (8, 6, 3)), True),
        (Server("redis", (8, 10, 0)), True),
        (Server("valkey", (8, 6, 3)), False),  # Redis' number is no measure for Valkey
        (Server("valkey", (9, 1, 0)), False),
        (Server("valkey", (9, 1, 10)), True),
    ],
)
def test_one_least_version_of_each_program_decides(server, safe):
    assert is_safe(server) is safe
    assert (warning_about(server) is None) is safe


def test_a_warning_names_the_server_and_the_least_versions():
    warning = warning_about(Server("redis", (7, 0, 15)))

    assert warning is not None
    assert "at least Redis 8.6.3 or Valkey 9.1.1, got Redis 7.0.15" in warning
    assert warning_about(None) is None


def test_unknown_words_are_no_server():
    assert server_of_info({"redis_version": ""}) is None
    assert server_of_info({}) is None
    assert server_of_banner("hello") is None


def test_the_server_that_we_bring_is_recognised(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        server = server_of_info(client.info("server"))

    assert server is not None
    assert len(server.version) == 3


def test_a_client_that_meets_a_server_that_is_too_old_logs_it_once(redis_url, monkeypatch):
    monkeypatch.setattr(server_identity, "server_of_info", lambda _: Server("redis", (6, 2, 14)))

    with (
        structlog.testing.capture_logs() as logs,
        Store(redis_url, "run", admits=lambda *_: True) as store,
    ):
        store.ping()
        store.run(operations.stats())

    (line,) = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert "got Redis 6.2.14" in line


@pytest.mark.parametrize("admits", [None, lambda *_: True])
def test_no_client_works_with_a_server_in_cluster_mode(tmp_path, admits):
    async def ask(url):
        store = AsyncStore(url, "run")
        try:
            await store.run(operations.stats())
        finally:
            await store.close()

    with server_in_cluster_mode(tmp_path / "node") as url:
        with (
            Store(url, "run", admits=admits) as store,
            pytest.raises(StoreUnfit, match=r"or the sentinels.*cluster-enabled no"),
        ):
            store.run(operations.stats())
        with pytest.raises(StoreUnfit, match="got a server in cluster mode") as refusal:
            asyncio.run(ask(url))

    assert exit_code(refusal.value) == 2
