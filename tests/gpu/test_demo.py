"""The demo whole on one card: a learner and an actor share it, through shared memory.

`./run test-long learning` is the same on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.support.training_on_cards import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(1200)  # kernels compile, in learner and actor
def test_the_demo_learns_on_one_card(tmp_path: Path, table: list[str]) -> None:
    card = [
        "actors.kv_cache_gib=1",
        "actors.gpu_memory_utilization=0.3",
    ]  # beside whatever else is on it
    settings = ["actors.count=1", *card, "run.steps=40"]
    given = [word for each in settings for word in ("--set", each)]
    start = "from console.main import app; app()"
    command = [sys.executable, "-c", start, "up", str(ROOT / "configs/demo.yaml"), *given]

    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1100
    )

    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [each for each in done.stdout.splitlines() if "held-out accuracy after" in each][-1:]
    table.append(f"demo, 40 batches: {line.strip()}")
    assert (tmp_path / "runs/demo/report.html").exists()
