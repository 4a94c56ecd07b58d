"""Real ranks as processes of their own, forked from one that has torch and their module."""

from __future__ import annotations

import importlib
import os
import signal
import traceback
from pathlib import Path

from learner.model.rendezvous import RENDEZVOUS_FILE
from tests.learner.support.forks import run_in_fork

PATIENCE_S = 200


def run_ranks(folder: Path, *groups: tuple[str, int], within_s: float = PATIENCE_S) -> None:
    """Call `main(folder)` of modules of this folder on so many ranks; all must end."""
    run_in_fork(_run_groups, folder, groups, within_s=within_s)


def _run_groups(folder: Path, groups: tuple[tuple[str, int], ...]) -> None:
    for name, ranks in groups:
        main = importlib.import_module(f"tests.learner.support.ranks.{name}").main
        os.environ |= {
            "WORLD_SIZE": str(ranks),
            RENDEZVOUS_FILE: str(folder / f"rendezvous-{name}-{ranks}"),
        }
        _run_group(main, folder, ranks)


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
