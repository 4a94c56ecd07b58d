"""The broker as a process, with its log in the run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.settings import Settings


@contextmanager
def process(
    settings: Settings, redis_url: str, *overrides: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m broker`, with its log in the run folder; killed at the end if it still runs."""
    folder = settings.run.folder
    flags = [text for override in overrides for text in ("--set", override)]
    with (folder / "broker.log").open("ab") as log:
        broker = subprocess.Popen(
            [sys.executable, "-m", "broker", "--config", str(folder / "config.yaml"), *flags],
            stderr=log,
            env={**os.environ, "NYALA_REDIS_URL": redis_url, "PYTHONPATH": str(Path.cwd())},
        )
    try:
        yield broker
    finally:
        broker.kill()
        broker.wait()
