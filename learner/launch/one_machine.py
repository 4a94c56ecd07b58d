"""Several ranks on one machine, which listen on loopback alone.

They meet through a file in a private folder, and gloo and NCCL use the loopback interface, unless a
person has set another. A TCP store, which torchrun would start, listens on every interface.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import structlog

from learner.model.rendezvous import RENDEZVOUS_FILE, interfaces

from .rank_processes import TICK_S, RankProcesses, Share, rank_command

log = structlog.get_logger()


def launch(arguments: list[str], *, ranks: int, stopping: threading.Event) -> int:
    """Run `python -m learner <arguments>` as `ranks` processes; the first failure's exit code.

    No rank is restarted alone: whoever started this starts all again, at the newest checkpoint.
    """
    folder = Path(tempfile.mkdtemp(prefix="nyala-ranks-"))
    environment = {
        RENDEZVOUS_FILE: str(folder / "ranks"),
        **interfaces("lo", os.environ),
    }
    processes = RankProcesses(rank_command(arguments), Share(0, ranks, ranks), environment)
    try:
        while (code := processes.code()) is None:
            if stopping.wait(TICK_S):
                processes.signal(signal.SIGTERM)  # rank 0 checkpoints, and all end
                while (code := processes.code()) is None:
                    time.sleep(TICK_S)
                break
        if code:
            log.error("a rank failed", exit_code=code)
        return code
    finally:
        processes.end()
        shutil.rmtree(folder, ignore_errors=True)
