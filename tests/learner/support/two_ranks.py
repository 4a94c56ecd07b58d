"""Two real ranks as processes of their own, each running a module of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from learner.model.ranks import RENDEZVOUS_FILE

ROOT = Path(__file__).parents[3]


def run_two_ranks(module: str, folder: Path) -> None:
    """Run `python -m module folder` as both ranks of a group; both must end well."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        RENDEZVOUS_FILE: str(folder / "rendezvous"),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env={**environment, "RANK": str(rank)},
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
