"""Redis clients from a URL: one server, one behind TLS, a pair that sentinels watch.

    redis://[user:password@]host:port/db              one server
    rediss://...?ssl_ca_certs=FILE                    the same behind TLS, checked
    unix://[user:password@]/path.sock?db=0            one server on this machine
    redis+sentinel://[user:password@]host:port,host:port/service/db
                                                      the primary that these sentinels name
    rediss+sentinel://...                             the same, all behind TLS

After the `?` go options of the client; `sentinel_username` and `sentinel_password` are for the
sentinels. No client made here ever sends a command twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as _AsyncSentinel
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.connection import parse_url as _parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel as _Sentinel

from configs.errors import SettingsError

Sentinel: Any = _Sentinel  # the library gives these no types
AsyncSentinel: Any = _AsyncSentinel
parse_url: Any = _parse_url

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 20.0
"""Longest wait for a reply. A script call takes milliseconds; a slower server is gone or swapping.
"""

PROTOCOL = 2
"""Version of Redis' protocol; version 3 adds push messages, which are not read here."""

SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix", *SENTINEL_SCHEMES)

_URL = re.compile(r"([^:/?#]+)://([^/?#]*)([^?#]*)\??([^#]*)")


class Watched(NamedTuple):
    """A service that sentinels watch."""

    sentinels: list[tuple[str, int]]
    service: str
    of_sentinels: dict[str, Any]
    of_server: dict[str, Any]


def connect(url: str, **options: Any) -> redis.Redis:
    """Make a blocking client; nothing is sent yet.

    Raises:
        SettingsError: The URL has none of the forms above, or a port or option that is malformed.
    """
    options = _client_options() | {"retry": Retry(NoBackoff(), 0)} | options
    watched = parse_sentinel_url(url)
    if watched is None:
        with _refusing_malformed(url):
            return redis.Redis.from_url(url, **options)
    manager = Sentinel(
        watched.sentinels,
        sentinel_kwargs=_client_options() | {"retry": Retry(NoBackoff(), 0)} | watched.of_sentinels,
    )
    client: redis.Redis = manager.master_for(watched.service, **(options | watched.of_server))
    return client


def connect_async(url: str, **options: Any) -> redis.asyncio.Redis:
    """Make an asyncio client; nothing is sent yet. Raises as `connect` does."""
    options = _client_options() | {"retry": AsyncRetry(NoBackoff(), 0)} | options
    watched = parse_sentinel_url(url)
    if watched is None:
        with _refusing_malformed(url):
            client = redis.asyncio.Redis.from_url(url, **options)
    else:
        manager = AsyncSentinel(
            watched.sentinels,
            sentinel_kwargs=_client_options()
            | {"retry": AsyncRetry(NoBackoff(), 0)}
            | watched.of_sentinels,
        )
        client = manager.master_for(watched.service, **(options | watched.of_server))
    client.connection_pool.connection_kwargs["protocol"] = (
        PROTOCOL  # also where the URL asks for another
    )
    return client


def disconnect(client: redis.Redis) -> None:
    """Close all connections of a client, including those to sentinels."""
    client.close()
    client.connection_pool.disconnect()
    for sentinel in _sentinels_of(client):
        sentinel.close()


async def disconnect_async(client: redis.asyncio.Redis) -> None:
    """Close all connections of an asyncio client, as `disconnect` does."""
    await client.aclose()
    await client.connection_pool.disconnect()
    for sentinel in _sentinels_of(client):
        await sentinel.aclose()


def parse_sentinel_url(url: str) -> Watched | None:
    """Read a URL that names sentinels; None for any other.

    Raises:
        SettingsError: The URL names no sentinel or no service, or is no URL of Redis.
    """
    parts = split_url(url)
    if parts.scheme not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise SettingsError(
            f"buffer.url must begin with one of {schemes}, got {without_password(url)!r}; name one "
            f"server, or the sentinels that watch it"
        )
    if parts.scheme not in SENTINEL_SCHEMES:
        return None
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    addresses = [_host_and_port(host, SENTINEL_PORT) for host in hosts.split(",") if host]
    if not addresses or not service or None in addresses:
        raise SettingsError(
            f"buffer.url must be {parts.scheme}://[user:password@]host:port,host:port/service/db, "
            f"got {without_password(url)}; name at least one sentinel, its port as a number, and "
            "the service that it watches"
        )
    plain = f"{SENTINEL_SCHEMES[parts.scheme]}://{user}{at}any:1/{db or 0}?{parts.query}"
    with _refusing_malformed(url):
        of_server: dict[str, Any] = dict(parse_url(plain))
    del of_server["host"], of_server["port"]
    of_sentinels = {
        name.removeprefix("sentinel_"): of_server.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in of_server
    }
    if of_server.pop("connection_class", None) is SSLConnection:
        of_server["ssl"] = True
        of_sentinels |= {k: v for k, v in of_server.items() if k.startswith("ssl")}
    return Watched([a for a in addresses if a is not None], service, of_sentinels, of_server)


def without_password(url: str) -> str:
    """Return a Redis URL without user and password, for texts and logs."""
    parts = split_url(url)
    query = "..." if "password" in parts.query else parts.query
    if "@" in parts.path:  # a password with an unescaped slash, which ends the address here
        return f"{parts.scheme}://***@{url.rpartition('@')[2].partition('?')[0]}"
    netloc = "***@" + parts.netloc.rpartition("@")[2] if "@" in parts.netloc else parts.netloc
    return parts._replace(netloc=netloc, query=query).geturl()


def split_url(url: str) -> SplitResult:
    """Split a URL; `urlsplit` refuses a list of hosts with an IPv6 address in it."""
    match = _URL.match(url)
    if match is None:
        return urlsplit(url)
    scheme, netloc, path, query = match.groups()
    return SplitResult(scheme, netloc, path, query, "")


@contextmanager
def _refusing_malformed(url: str) -> Iterator[None]:
    """Explain the ValueError of redis-py about a port or an option that it cannot read."""
    try:
        yield
    except ValueError:
        raise SettingsError(
            f"buffer.url must have a port from 0 to 65535 and options of redis-py, got "
            f"{without_password(url)!r}; correct them, and write / # ? of a password as %2F %23 %3F"
        ) from None


def _host_and_port(host: str, default_port: int) -> tuple[str, int] | None:
    name, _, port = host.rpartition(":")
    if not name:
        return host, default_port
    return (name.strip("[]"), int(port)) if port.isdecimal() else None


def _client_options() -> dict[str, Any]:
    return {
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry_on_error": [],
        "protocol": PROTOCOL,
        "decode_responses": False,
    }


def _sentinels_of(client: Any) -> list[Any]:
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)
