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
from configs.settings import Settings

LIMIT_S = 7200.0


def trl_is_missing() -> str | None:
    """Return how to install TRL where it is not."""
    return None if find_spec("trl") else "trl is not installed; PYTHONPATH=.venv/peers has it"


def flags_of(settings: Settings) -> dict[str, object]:
    """Return the flags of `trainer.py` that sample, evaluate and optimise as these settings do."""
    run, learner = settings.run, settings.learner
    return {
        "eval_every": run.eval_every,
        "batch": run.group_size * run.groups_per_batch,
        "group_size": run.group_size,
        "max_tokens": run.max_completion_tokens,
        "temperature": run.temperature,
        "lr": learner.lr,
        "lr_warmup_steps": learner.lr_warmup_steps,
        "adam_beta2": learner.adam_beta2,
    }


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
