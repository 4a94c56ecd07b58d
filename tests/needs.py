"""Parts of a machine that some tests need, and the count of the tests left out without them.

A test that a machine cannot run is no plain skip: the summary of a run has one line for each part
that is missing, with the number of tests, the reason, and the command that brings it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.engine.choice import lack_of_vllm
from configs.machine import visible_gpus
from lab.faults.network import obstacle

PROBE_S = 10.0
NEEDS = "needs "
SUMMARY = "NYALA_LEFT_OUT"
"""Environment variable: a file to which the lines of the summary are added."""


def _vllm() -> str | None:
    return lack_of_vllm(on_gpu=bool(visible_gpus()))


def _namespaces() -> str | None:
    command = ("unshare", "-rmn", "true")
    made = shutil.which("unshare") and subprocess.run(
        command, check=False, capture_output=True, timeout=PROBE_S
    )
    return None if made and not made.returncode else "this user may not make any (run it as root)"


def _triton() -> str | None:
    found = find_spec("triton")
    return None if found else "no triton, which has the interpreter (pip install triton)"


def _root() -> str | None:
    return "another user runs the tests" if os.geteuid() else None


def _program(name: str, package: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(name) else f"no {name} (apt install {package})"


PARTS: dict[str, Callable[[], str | None]] = {
    "vLLM": _vllm,
    "Triton": _triton,
    "namespaces": _namespaces,
    "root": _root,
    "a second network": obstacle,
    "a second network with a limit": lambda: obstacle(limits=True),
    "promtool": _program("promtool", "prometheus"),
    "openssl": _program("openssl", "openssl"),
}


@cache
def lack(part: str) -> str | None:
    """Say why this machine lacks a part; None = it has it."""
    return PARTS[part]()


def needs(part: str) -> pytest.MarkDecorator:
    """Leave a test, or as `pytestmark` a module, out where the machine lacks this part."""
    reason = lack(part)
    return pytest.mark.skipif(reason is not None, reason=f"{NEEDS}{part}: {reason}")


def skip_without(part: str) -> None:
    """Leave out the rest of a test, or what uses a fixture."""
    if reason := lack(part):
        pytest.skip(f"{NEEDS}{part}: {reason}")


class LeftOut:
    """Counts them, as a plugin of pytest."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test by what it needs."""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith(NEEDS):
                self._counts[reason.removeprefix(NEEDS)] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write a line for each part, here and for whoever collects several runs."""
        counts = sorted(self._counts.items())
        for part, count in counts:
            terminalreporter.write_line(f"{count} test(s) left out without {part}", yellow=True)
        if counts and (path := os.environ.get(SUMMARY)):
            with Path(path).open("a", encoding="utf-8") as file:
                file.writelines(f"{count} {part}\n" for part, count in counts)
