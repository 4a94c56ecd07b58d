"""Waiting for what another process does, with a deadline."""

import os
import time
from pathlib import Path


def wait_until(condition, *, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid):
    """A process that ended and was not reaped by whoever inherited it is dead too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def read_pid(path):
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())
