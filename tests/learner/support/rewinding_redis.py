"""A Redis server of one test, which can be killed, wiped, and set back to an earlier state."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.conftest import find_redis_server


class RewindingRedis:
    """A server that logs every write; a copy of its log taken earlier is a past to go back to."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._folder = folder
        self._files = folder / "now"
        self._files.mkdir(parents=True)
        self._pasts = 0
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "dir": str(self._files),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
        }
        command = [find_redis_server(), *(x for k, v in options.items() for x in (f"--{k}", v))]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        with redis.Redis.from_url(self.url) as client:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    return
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.01)

    def kill(self) -> None:
        """End the server as a power loss does."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def remember(self) -> Path:
        """Copy what is in the log now."""
        with self._lock:
            self._pasts += 1
            past = self._folder / f"past-{self._pasts}"
            shutil.copytree(self._files, past)
            return past

    def restart(self, past: Path | None = None) -> None:
        """Kill the server and start it again, with its own files or with those of a past."""
        with self._lock:
            self.kill()
            if past is not None:
                shutil.rmtree(self._files)
                shutil.copytree(past, self._files)
            self.start()

    def wipe(self) -> None:
        """Kill the server and start it without any files."""
        with self._lock:
            self.kill()
            shutil.rmtree(self._files)
            self._files.mkdir()
            self.start()


@contextlib.contextmanager
def rewinding_redis(folder: Path) -> Iterator[RewindingRedis]:
    """A running server, ended with the block."""
    server = RewindingRedis(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
