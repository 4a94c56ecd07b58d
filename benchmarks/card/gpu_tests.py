"""`tests/gpu` whole: what passed, what failed, and the table that it prints."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.card.stage import Asked, Note, main
from benchmarks.support.machine import REPOSITORY

TESTS = REPOSITORY / "tests/gpu"


class Outcomes:
    """Counts the tests of each file, and hands the figures of a file over when the next begins."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._file = ""
        self._began = time.monotonic()
        self._names: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test by its call, or by its setup where that failed or left it out."""
        file, _, name = report.nodeid.partition("::")
        if Path(file).stem != self._file:
            self.hand_over()
            self._file = Path(file).stem
        if report.when == "call" or report.outcome != "passed":
            self._names[report.outcome].append(name)

    def hand_over(self) -> None:
        """Write what is known of the file so far."""
        if self._file:
            seconds = round(time.monotonic() - self._began, 1)
            failed = {"failed": failed} if (failed := self._names["failed"]) else {}
            counts = {name: len(self._names[name]) for name in ("passed", "skipped")}
            self._note(self._file, {**counts, **failed, "seconds": seconds})
        self._names.clear()
        self._began = time.monotonic()

    def pytest_terminal_summary(self, config: pytest.Config) -> None:
        """Hand over the last file, and the table of `tests/gpu/conftest.py`."""
        self.hand_over()
        from tests.gpu.conftest import TABLE

        self._note("table", {"lines": config.stash[TABLE]})


def measure(asked: Asked, note: Note) -> None:
    """Run them; of the tiny form all are left out, as on a machine without a card."""
    flags = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    place = ["--basetemp", str(asked.folder / "tests"), str(TESTS)]
    raise SystemExit(pytest.main([*flags, *place], plugins=[Outcomes(note)]))


if __name__ == "__main__":
    main(measure)
