"""TRL's arm as a process of its own, because it needs packages that Nyala itself does not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.support.machine import REPOSITORY
from benchmarks.support.workload import environment

LIMIT_S = 7200.0


def trl_is_missing() -> str | None:
    """Return how to install TRL where it is not."""
    return None if find_spec("trl") else "trl is not installed; PYTHONPATH=.venv/peers has it"


def run_trl(log: Path, **flags: object) -> dict[str, Any]:
    """Train with `trainer.py`, whose flags these are, and return what it found.

    Raises:
        RuntimeError: It failed; names the log.
    """
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "ring" / "trl" / "trainer.py")]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with log.open("a") as errors:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(),
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}; see {log}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
