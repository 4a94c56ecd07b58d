"""A Redis server of one test, which can be killed, wiped, and set back to an earlier state."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import redis

from console.run.redis_server import free_port
from tests.conftest import find_redis_server
from tests.waiting import wait_until


class RewindingRedis:
    """A server that logs every write; a copy of its log taken earlier is a past to go back to."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
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
            "appendfsync": "no",  # else a sync under way delays writes, and a copy lacks them
        }
        command = [find_redis_server(), *(x for k, v in options.items() for x in (f"--{k}", v))]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)
        with redis.Redis.from_url(self.url) as client:
            wait_until(client.ping, "the server does not start", ignoring=redis.ConnectionError)

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
