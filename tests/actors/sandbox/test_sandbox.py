"""The sandbox for programs: what works in it, what ends it, and where there is none."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.environments.registry import check_environment
from actors.sandbox import sandbox as module
from actors.sandbox.kernel import VIEWS
from actors.sandbox.sandbox import Limits, Sandbox
from configs.errors import RewardError, SettingsError
from configs.settings import RunSettings
from tests.actors.support.sandboxes import sandbox_of
from tests.waiting import wait_until

LIBRARY = """
import asyncio, bisect, collections, decimal, fractions, functools, hashlib, heapq, itertools, json
import math, random, re, statistics, string, sys, threading, zlib
from dataclasses import dataclass
total = sum(map(int, sys.stdin.read().split()))
print(decimal.Decimal(1) / 3, total, hashlib.sha256().hexdigest()[:4])
async def later(): await asyncio.sleep(0.01); return 7
print(asyncio.run(later()))
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
thread = threading.Thread(target=lambda: print(deep(20000)))
thread.start(); thread.join()
if __name__ == "__main__": print("main")
"""


@pytest.fixture(params=VIEWS)
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return sandbox_of(request.param, monkeypatch)


def test_a_program_has_the_standard_library_threads_and_its_input(sandbox: Sandbox) -> None:
    outcome = sandbox.run(LIBRARY, b"1 2\n3", Limits())

    lines = outcome.output.decode().splitlines()
    assert outcome.status == 0
    assert lines == ["0.3333333333333333333333333333 6 e3b0", "7", "20000", "main"]


def test_files_that_only_this_user_may_read_do_not_close_it(sandbox: Sandbox) -> None:
    before = os.umask(0o077)
    try:
        assert sandbox.run("import decimal", b"", Limits()).status == 0
    finally:
        os.umask(before)


def test_each_end_is_told_from_the_others(sandbox: Sandbox) -> None:
    limits = Limits(time_s=1, wall_s=1, output_bytes=1000)

    assert sandbox.run("import sys; sys.exit(3)", b"", limits).status == 3
    assert sandbox.run("no python", b"", limits).status == 1
    assert sandbox.run("import signal; signal.pause()", b"", limits).status is None
    flood = sandbox.run("while True: print('x' * 99)", b"", limits)
    assert flood.status is None
    assert 1000 < len(flood.output) < 1000 + (1 << 17)


@pytest.mark.slow
def test_the_limit_of_time_is_of_the_processor_however_busy_the_machine(sandbox: Sandbox) -> None:
    spin = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"

    assert sandbox.run(spin, b"", Limits(time_s=1, wall_s=60)).status == -signal.SIGKILL


def test_a_program_ends_with_the_actor(sandbox: Sandbox) -> None:
    actor = f"""
import signal, threading
from actors.sandbox import sandbox
from actors.sandbox.sandbox import Limits, Sandbox
sandbox.INTERPRETER = {module.INTERPRETER!r}
slow = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
threading.Thread(target=Sandbox({sandbox.view!r}).run, args=(slow, b"", Limits(wall_s=60))).start()
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", actor], cwd=Path(__file__).parents[3])
    wait_until(lambda: _in_sandboxes_of(process.pid))

    process.kill()
    process.wait()

    wait_until(lambda: not _in_sandboxes_of(process.pid))


def test_where_no_process_can_be_had_nothing_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox.find()
    monkeypatch.setattr(module, "INTERPRETER", "/nowhere/python")

    with pytest.raises(
        RewardError, match=r"the process of a sandbox must start, got .*No such file"
    ):
        sandbox.run("print(1)", b"", Limits())


def test_a_process_that_is_not_locked_in_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = module.ENTER.replace("main()", "")
    broken += "import actors.sandbox.entry as e; e.filter_for = lambda pid: b'12345678'; e.main()"
    monkeypatch.setattr(module, "ENTER", broken)

    with pytest.raises(
        RewardError, match="must be ready within 10 s, got one that was not, so nothing"
    ):
        Sandbox(VIEWS[1]).run("print(1)", b"", Limits())


@pytest.mark.parametrize(
    "leak",
    [
        "e.filter_for = lambda pid: struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)",
        "e.enter_namespaces = e.restrict_with_landlock = lambda *a, **k: None",
    ],
)
def test_a_sandbox_that_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, leak: str
) -> None:
    enter = "import actors.sandbox.entry as e, struct; " + leak
    monkeypatch.setattr(module, "ENTER", module.ENTER.replace("main()", f"{enter}; main()"))

    with pytest.raises(SettingsError, match="a sandbox for programs must be possible"):
        Sandbox.find()


def test_without_namespaces_and_landlock_a_run_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse = "import actors.sandbox.kernel as k; k.unshare = k.system_call = lambda *a: 1 / 0"
    monkeypatch.setattr(module, "ENTER", module.ENTER.replace("main()", f"{refuse}; main()"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2?", "tests": "assert f(1) == 2"}\n' * 20)
    settings = {"path": str(tmp_path / "rows.jsonl"), "answer": "tests", "scorer": "code"}
    run = RunSettings(model="init", environment="dataset", environment_settings=settings)

    with pytest.raises(SettingsError, match="possible on this machine") as refused:
        check_environment(run)
    assert "namespaces: ZeroDivisionError" in str(refused.value)
    assert "landlock: ZeroDivisionError" in str(refused.value)
    assert "it takes Linux 5.13 or newer with Landlock" in str(refused.value)


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    with pytest.raises(SettingsError, match="must be on x86_64, got aarch64"):
        Sandbox.find()


def _in_sandboxes_of(pid: int) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any("actors.sandbox.entry" in word for word in words) and str(pid) in words:
            found.append(place.parent.name)
    return found
