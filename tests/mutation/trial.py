"""Trials: a mutant in a copy of the checkout, and the tests that should fail there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from .mutant import Mutant
from .targets import ROOT, Target

SURVIVED: Final = "survived"
Outcome = Literal["killed", "hung", "survived"]

LONGEST_S = 900.0
"""Of a stage without any mutant; longer, and its tests are not fit for this."""
SLACK, SLACK_S = 3.0, 20.0
"""A mutant may take this many times as long as none, and this much longer, before it has hung."""

PASSED, FAILED, NO_TESTS = 0, 1, 5


class Trial(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    took_s: float


class Workplace:
    """A copy of the checkout in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._usual_s: dict[tuple[str, ...], float] = {}

    def try_mutant(self, mutant: Mutant, target: Target) -> Trial:
        """Run the stages of the target on the changed file until one fails.

        Raises:
            RuntimeError: A stage fails without the mutant.
        """
        began = time.monotonic()
        outcome: Outcome = SURVIVED
        for stage in target.stages:
            usual_s = self._measure(stage)
            code = self._run_changed(mutant, stage, timeout_s=SLACK * usual_s + SLACK_S)
            if code not in {PASSED, NO_TESTS}:
                outcome = "hung" if code is None else "killed"
                break
        return Trial(mutant, outcome, time.monotonic() - began)

    def _run_changed(self, mutant: Mutant, stage: tuple[str, ...], timeout_s: float) -> int | None:
        path = self._folder / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            return self._run(stage, timeout_s=timeout_s)
        finally:
            path.write_text(source)

    def _measure(self, stage: tuple[str, ...]) -> float:
        """Return how long a stage takes without a mutant; it is run once."""
        if stage in self._usual_s:
            return self._usual_s[stage]
        for _ in range(2):  # a busy machine may make a test fail once
            began = time.monotonic()
            if self._run(stage, timeout_s=LONGEST_S) == PASSED:
                return self._usual_s.setdefault(stage, time.monotonic() - began)
        raise RuntimeError(f"without any mutant, pytest {' '.join(stage)} must pass, and failed")

    def _run(self, stage: tuple[str, ...], *, timeout_s: float) -> int | None:
        """Run pytest; returns its exit code, None if it did not end in time."""
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [*command, "-p", "no:xdist", *stage],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):  # children of a test that was cut short
                    os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def workplace() -> Iterator[Workplace]:
    """Copy what git tracks into a temporary folder, for one worker."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    with tempfile.TemporaryDirectory(prefix="nyala-mutant-") as folder:
        for name in listed.stdout.decode().split("\0"):
            source, copy = ROOT / name, Path(folder) / name
            if name and source.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)
        yield Workplace(Path(folder))
