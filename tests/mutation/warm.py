"""Runs of pytest in forks of one process, which has imported the packages that tests need.

It never imports a module of this project: those are what a mutant changes. `trial.py` starts it in
a copy of the checkout; each line of its input asks for a run, and is answered with one line.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain")
PR_SET_CHILD_SUBREAPER = 36
CRASHED = 3  # pytest's own code for an internal error


class Selection:
    """Leaves out tests that have passed, and reports those that ran, those that failed and more."""

    def __init__(self, passed: list[str]) -> None:
        self.report: dict[str, list[str]] = {"tests": [], "failed": [], "modules": []}
        self._passed = set(passed)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._passed]
        self.report["tests"] = [item.nodeid for item in items]
        self.report["modules"] = list(filter(_is_of_others, list(sys.modules)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.report["failed"].append(report.nodeid)


def _is_of_others(module: str) -> bool:
    return "/site-packages/" in str(getattr(sys.modules[module], "__file__", ""))


def main() -> None:
    """Answer requests until the input ends."""
    # What a test leaves behind becomes a child of this process, which ends it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        request = json.loads(line)
        code, report = _run_in_fork(request)
        if not request["is_mutated"]:
            _import_all(report.pop("modules", []))
        print(json.dumps({"code": code, **report}), flush=True)


def _import_all(modules: list[str]) -> None:
    for module in modules:
        with suppress(Exception):  # some are only to be had by way of others
            importlib.import_module(module)
    threads = Path("/proc/self/task").iterdir()
    assert len(list(threads)) == 1, "a fork of several threads may deadlock"
    gc.collect()
    gc.freeze()  # pages stay shared with the forks


def _run_in_fork(request: dict[str, Any]) -> tuple[int | None, dict[str, list[str]]]:
    """Return the exit code, None if it did not end in time, and what `Selection` reports."""
    pages = os.memfd_create("report")
    child = os.fork()
    if child == 0:
        code = CRASHED
        try:
            code = _run(request, pages)
        finally:
            os._exit(code)
    has_ended = _wait(child, request["timeout_s"])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _end_orphans()
    with os.fdopen(pages, "rb") as file:
        file.seek(0)
        report = json.loads(file.read() or b"{}")
    return os.waitstatus_to_exitcode(status) if has_ended else None, report


def _run(request: dict[str, Any], pages: int) -> int:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    if request[
        "is_mutated"
    ]:  # the compiled original stays, and nobody compiles a mutant for others
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    random.seed()
    selection = Selection(request["passed"])
    code = pytest.main([*ARGUMENTS, *request["arguments"]], plugins=[selection])
    with os.fdopen(pages, "w") as file:
        json.dump(selection.report, file)
    return int(code)


def _wait(child: int, timeout_s: float) -> bool:
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def _end_orphans() -> None:
    """End all children; those of theirs become children in turn."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while left := children.read_text().split():
        for pid in map(int, left):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
