"""Trials: a mutant in a copy of the checkout, and the tests that should fail there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple

from .mutant import Mutant
from .targets import ROOT, Target

SURVIVED: Final = "survived"
Outcome = Literal["killed", "hung", "survived"]

LONGEST_S = 1800.0
"""Of a stage without any mutant; longer, and its tests are not fit for this."""
SLACK, SLACK_S = 5.0, 60.0
"""A mutant may take this many times as long as none, and this much longer, before it has hung."""

PASSED, NO_TESTS = 0, 5


class Trial(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    took_s: float


class Run(NamedTuple):
    """A run of pytest."""

    code: int | None
    """None: it did not end in time."""
    tests: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def has_passed(self) -> bool:
        return self.code in {PASSED, NO_TESTS}


class Usual(NamedTuple):
    """A stage without a mutant."""

    took_s: float
    tests: tuple[str, ...]


class Workplace:
    """A copy of the checkout in which one mutant at a time is tried."""

    def __init__(self, folder: Path, requests: IO[str], answers: IO[str]) -> None:
        self._folder = folder
        self._requests, self._answers = requests, answers
        self._usual: dict[tuple[tuple[str, ...], ...], Usual] = {}

    def try_mutant(self, mutant: Mutant, target: Target) -> Trial:
        """Run the stages of the target on the changed file until one fails.

        Raises:
            RuntimeError: A stage fails without the mutant.
        """
        outcome: Outcome = SURVIVED
        took_s, passed = 0.0, tuple[str, ...]()
        for i in range(len(target.stages)):
            usual = self._measure(target.stages[: i + 1])
            began = time.monotonic()
            with self._changed(mutant):
                outcome = self._try_stage(target.stages[i], passed, SLACK * usual.took_s + SLACK_S)
            took_s += time.monotonic() - began
            passed += usual.tests
            if outcome != SURVIVED:
                break
        return Trial(mutant, outcome, took_s)

    def _try_stage(
        self, stage: tuple[str, ...], passed: tuple[str, ...], timeout_s: float
    ) -> Outcome:
        for is_repeated in (False, True):  # a busy machine may make a test fail once
            run = self.run(stage, passed, timeout_s=timeout_s)
            if run.code is None:
                return "hung"
            if run.has_passed:
                break
            alone = self.run(run.failed, timeout_s=timeout_s) if run.failed else run
            if is_repeated or not alone.has_passed:
                return "killed"
        return SURVIVED

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
        try:
            yield
        finally:
            path.write_text(source)

    def _measure(self, stages: tuple[tuple[str, ...], ...]) -> Usual:
        """Return how long the last of these stages takes without a mutant; it is run once."""
        if stages in self._usual:
            return self._usual[stages]
        passed = [test for i in range(1, len(stages)) for test in self._usual[stages[:i]].tests]
        for _ in range(2):  # a busy machine may make a test fail once
            began = time.monotonic()
            run = self.run(stages[-1], tuple(passed), timeout_s=LONGEST_S, is_mutated=False)
            if run.has_passed:
                usual = Usual(time.monotonic() - began, run.tests)
                return self._usual.setdefault(stages, usual)
        tests = " ".join(run.failed or stages[-1])
        raise RuntimeError(f"without any mutant, pytest {tests} must pass, and failed")

    def run(
        self,
        arguments: tuple[str, ...],
        passed: tuple[str, ...] = (),
        *,
        timeout_s: float,
        is_mutated: bool = True,
    ) -> Run:
        """Run pytest in a fork, without the tests of `passed`."""
        request = {
            "arguments": arguments,
            "passed": passed,
            "timeout_s": timeout_s,
            "is_mutated": is_mutated,
        }
        print(json.dumps(request), file=self._requests, flush=True)
        answer = json.loads(self._answers.readline())
        tests, failed = answer.get("tests", ()), answer.get("failed", ())
        return Run(answer["code"], tuple(tests), tuple(failed))


@contextmanager
def copied_checkout() -> Iterator[Workplace]:
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
        with workplace(Path(folder)) as place:
            yield place


@contextmanager
def workplace(folder: Path) -> Iterator[Workplace]:
    """Start the process whose forks run tests in this folder."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        # -P: the folder of the script is no place to import from.
        [sys.executable, "-P", str(Path(__file__).with_name("warm.py"))],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as warm:
        assert warm.stdin and warm.stdout
        yield Workplace(folder, warm.stdin, warm.stdout)
        warm.stdin.close()
