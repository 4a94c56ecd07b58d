"""URLs of Redis, against real sentinels and real TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from buffer import operations
from buffer.client.address import parse_sentinel_url, without_password
from buffer.operations.values import NewTask
from buffer.store import AsyncStore, Store
from configs.errors import SettingsError, StoreError, StoreUnreachable
from tests.buffer.support.run_in_store import RunInStore
from tests.buffer.support.servers import tls_front, watched_pair
from tests.needs import needs
from tests.waiting import wait_until


def test_a_url_with_sentinels_names_them_the_service_and_the_database() -> None:
    watched = parse_sentinel_url("redis+sentinel://me:p%40ss@a:1,b,[::1]:3/nyala/2")

    assert watched is not None
    assert watched.sentinels == [("a", 1), ("b", 26379), ("::1", 3)]
    assert watched.service == "nyala"
    assert watched.of_server == {"username": "me", "password": "p@ss", "db": 2}
    assert parse_sentinel_url("redis://a:1/0") is None


def test_sentinels_may_have_a_password_and_tls_of_their_own() -> None:
    url = "rediss+sentinel://:pw@a:1/nyala?sentinel_password=other&ssl_ca_certs=ca.pem"
    watched = parse_sentinel_url(url)

    assert watched is not None
    ssl = {"ssl": True, "ssl_ca_certs": "ca.pem"}
    assert watched.of_sentinels == {"password": "other", "ssl_ca_certs": "ca.pem"} | ssl
    assert watched.of_server == {"password": "pw", "db": 0, **ssl}
    assert "other" not in without_password(url)
    assert "pw" not in without_password(url)


@pytest.mark.parametrize(
    "url", ["redis+sentinel:///nyala", "redis+sentinel://a:1", "redis+sentinel://a:x/nyala"]
)
def test_a_url_without_sentinels_or_service_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="name at least one sentinel"):
        Store(url, "run")


@pytest.mark.parametrize(
    "url",
    [
        "redis://a:x/0",
        "redis://a:99999/0",
        "redis://a:1/0?socket_timeout=x",
        "redis+sentinel://a:1/nyala/0?socket_timeout=x",
    ],
)
@pytest.mark.parametrize("client", [Store, AsyncStore])
def test_a_malformed_port_or_option_is_refused(client: type, url: str) -> None:
    with pytest.raises(SettingsError, match=r"buffer\.url must have a port from 0 to 65535"):
        client(url, "run")


@pytest.mark.slow
def test_the_run_goes_on_at_the_server_that_the_sentinels_name_next(tmp_path: Path) -> None:
    lives: list[tuple[str, str]] = []

    def admits(run_id: str, state: str) -> bool:
        lives.append((run_id, state))
        return True

    with (
        watched_pair(tmp_path) as (primary, port, url),
        Store(url, "run", admits=admits) as store,
    ):
        plain = f"redis://:hunter2@127.0.0.1:{port}/0"
        with RunInStore(store, plain) as run:
            run.create(2)
            run.redis.set("last", 1)  # WAIT counts the writes of its own connection
            assert run.redis.wait(1, 5000) == 1

            async def count() -> int:
                other = AsyncStore(url, "run")
                created = (await other.run(operations.stats())).created
                await other.close()
                return created

            assert asyncio.run(count()) == 8

            primary.kill()
            with pytest.raises(StoreUnreachable):
                run.stats()

            def is_back() -> bool:
                return run.stats().created == 8

            wait_until(is_back, ignoring=StoreUnreachable)
            assert run.lease_status() == "WAIT"
            assert asyncio.run(count()) == 8
            (_, before), (run_id, after) = lives[0], lives[-1]
            assert (before, after) == ("NONE", "RECOVERING")
            store.run(operations.recovered(run.lineage, run_id))
            new = [NewTask(8, 2, b"")] + [NewTask(i, 2, b"") for i in (9, 10, 11)]
            assert store.run(operations.create(run.lineage, new)) == 4
            assert run.lease_status() == "OK"


@needs("openssl")  # makes the certificate
def test_a_server_behind_tls_must_show_a_certificate_that_is_trusted(
    redis_url: str, tmp_path: Path
) -> None:
    parts = urlsplit(redis_url)
    assert parts.port is not None
    with tls_front(tmp_path, parts.port) as (port, certificate):
        url = redis_url.replace("redis://", "rediss://").replace(f":{parts.port}/", f":{port}/")
        with Store(f"{url}?ssl_ca_certs={certificate}", "run") as store:
            assert store.run(operations.stats()).state == "NONE"
        with Store(url, "run") as store, pytest.raises(StoreError, match="cannot be reached"):
            store.run(operations.stats())

        async def ask() -> str:
            store = AsyncStore(f"{url}?ssl_ca_certs={certificate}", "run")
            state = (await store.run(operations.stats())).state
            await store.close()
            return state

        assert asyncio.run(ask()) == "NONE"
