"""Real ranks as processes of their own: one process imports torch and a module of tests, and forks.

Arguments: a folder; then one group after the other, each as `module:ranks`. Each rank calls the
module's `main(folder)`.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401 - sharding imports it: once here, and not in each of the forks

from learner.model.rendezvous import RENDEZVOUS_FILE

ROOT = Path(__file__).parents[4]
PATIENCE_S = 200


def run_ranks(folder: Path, *groups: tuple[str, int]) -> None:
    """Call `main(folder)` of modules of this folder on so many ranks; all must end."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    arguments = [
        sys.executable,
        "-m",
        __name__,
        str(folder),
        *(f"{name}:{ranks}" for name, ranks in groups),
    ]
    with subprocess.Popen(arguments, env=environment, cwd=ROOT, start_new_session=True) as parent:
        try:
            assert parent.wait(PATIENCE_S) == 0
        except BaseException:
            os.killpg(
                parent.pid, signal.SIGKILL
            )  # the forks too: one of them may wait for another for long
            raise


def _main(folder: Path, *groups: str) -> None:
    for group in groups:
        name, _, ranks = group.partition(":")
        main = importlib.import_module(f"tests.learner.support.ranks.{name}").main
        os.environ |= {"WORLD_SIZE": ranks, RENDEZVOUS_FILE: str(folder / f"rendezvous-{group}")}
        _run_group(main, folder, int(ranks))


def _run_group(main: object, folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        if not os.fork():
            os.environ["RANK"] = str(rank)
            _run(main, folder)
    for _ in range(ranks):
        _, status = os.wait()
        if status:
            os.killpg(0, signal.SIGKILL)  # the others would wait for it


def _run(main: object, folder: Path) -> None:
    """Call it in a fork, and end there."""
    assert callable(main)
    try:
        main(folder)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - reported, and the process ends
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
