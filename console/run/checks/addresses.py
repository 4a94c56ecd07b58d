"""Check that what listens on this machine finds its addresses free."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from configs.errors import SettingsError
from configs.metrics.endpoint import endpoint_of
from configs.settings import Settings
from console.run.redis_server import is_free


def check_addresses(settings: Settings) -> str:
    """Each role can listen where its settings put it, and no two want the same port.

    Raises:
        SettingsError: An address is taken, wanted twice, or not of this machine.
    """
    wanted: dict[int, str] = {}
    places = list(_endpoints(settings))
    for setting, endpoint in places:
        port = check_address(setting, endpoint)
        if port and port in wanted:
            raise SettingsError(
                f"{setting} must have a port of its own, got {endpoint}, whose port is that of "
                f"{wanted[port]}; choose another"
            )
        wanted[port] = setting
    return ", ".join(f"{setting} {endpoint}" for setting, endpoint in places)


def check_address(setting: str, endpoint: str) -> int:
    """A process of ours can listen there; returns the port, 0 = any free one.

    Raises:
        SettingsError: It cannot.
    """
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or 0
    if host != "*" and port != 0 and not is_free(host, port):
        raise SettingsError(
            f"{setting} must be an address that is free on this machine, got {endpoint}, "
            f"which is in use or not ours; stop the program that listens there, or choose another "
            f"port ({parts.scheme}://127.0.0.1:0 takes any free one)"
        )
    return port


def _endpoints(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield where processes of this machine listen, each with its setting."""
    yield "broker.endpoint", settings.broker.endpoint
    yield "learner.publisher_endpoint", settings.learner.publisher_endpoint
    for table in ("broker", "learner"):
        if (page := getattr(settings, table).metrics_endpoint) is not None:
            yield f"{table}.metrics_endpoint", page
    if (page := settings.actors.metrics_endpoint) is not None:
        for number in range(settings.actors.count):
            yield "actors.metrics_endpoint", endpoint_of(page, number)
