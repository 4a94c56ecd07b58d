"""Holes by version: what servers say of themselves, and what follows."""

import pytest
import redis
import structlog

from buffer import operations
from buffer.client import server_identity
from buffer.client.server_identity import (
    HOLES,
    Server,
    holes_of,
    server_of_banner,
    server_of_info,
    warning_about,
)
from buffer.store import Store


def test_valkey_is_judged_by_its_own_version_and_not_as_the_redis_it_calls_itself():
    info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"}

    server = server_of_info(info)

    assert server == Server("valkey", (9, 1, 2))
    assert holes_of(Server("redis", (7, 2, 4)))
    assert not holes_of(server)


@pytest.mark.parametrize(
    ("server", "cve", "has_it"),
    [
        (Server("redis", (6, 2, 17)), "CVE-2025-21605", True),
        (Server("redis", (6, 2, 18)), "CVE-2025-21605", False),
        (Server("redis", (7, 0, 15)), "CVE-2025-21605", True),  # a line that was never mended
        (Server("redis", (8, 0, 0)), "CVE-2025-21605", False),  # a line that began with the mend
        (Server("redis", (8, 2, 1)), "CVE-2025-49844", True),
        (Server("redis", (8, 2, 2)), "CVE-2025-49844", False),
        (Server("redis", (8, 8, 1)), "CVE-2026-63639", False),  # of Valkey alone
        (Server("valkey", (8, 1, 3)), "CVE-2025-49844", True),
        (Server("valkey", (9, 0, 0)), "CVE-2025-49844", False),
        (Server("valkey", (9, 1, 0)), "CVE-2026-63639", True),
        (Server("valkey", (9, 1, 10)), "CVE-2026-63639", False),
    ],
)
def test_a_release_line_has_a_hole_until_its_own_mend(server, cve, has_it):
    assert (cve in holes_of(server)) is has_it


def test_lines_are_in_order_so_that_the_last_one_is_the_newest():
    for hole in HOLES:
        assert list(hole.redis) == sorted(hole.redis)
        assert list(hole.valkey) == sorted(hole.valkey)


def test_a_warning_names_server_and_holes():
    warning = warning_about(Server("redis", (7, 0, 15)))

    assert warning is not None
    assert "got Redis 7.0.15" in warning
    assert "CVE-2025-49844" in warning
    assert warning_about(Server("valkey", (9, 1, 2))) is None


def test_unknown_words_are_no_server():
    assert server_of_info({"redis_version": ""}) is None
    assert server_of_info({}) is None
    assert server_of_banner("hello") is None


def test_the_server_that_we_bring_is_recognised(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        server = server_of_info(client.info("server"))

    assert server is not None
    assert len(server.version) == 3


def test_a_client_that_meets_a_server_with_holes_logs_them_once(redis_url, monkeypatch):
    monkeypatch.setattr(server_identity, "server_of_info", lambda _: Server("redis", (6, 2, 14)))

    with (
        structlog.testing.capture_logs() as logs,
        Store(redis_url, "run", admits=lambda *_: True) as store,
    ):
        store.ping()
        store.run(operations.stats())

    (line,) = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert "Redis 6.2.14" in line
    assert "CVE-2025-49844" in line
