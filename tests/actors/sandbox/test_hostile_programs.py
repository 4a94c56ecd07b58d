"""Forty hostile programs, and eighteen that forge: each costs its own reward and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from actors.environments.dataset.programs import CodeScorer
from actors.sandbox import entry
from actors.sandbox.kernel import VIEWS
from actors.sandbox.sandbox import Limits, Sandbox
from tests.actors.support.hostile_programs import hostile_programs, programs_that_reach_out
from tests.actors.support.sandboxes import sandbox_of

LIMITS = Limits(time_s=1.0, wall_s=1.5, memory_mb=256)
TESTS = '[{"input": "2", "output": "4"}]'
RIGHT = "print(int(input()) ** 2)"


@pytest.fixture(params=VIEWS)
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return sandbox_of(request.param, monkeypatch)


class World:
    """What hostile programs may want: files, servers, the process of the test itself."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder = folder
        self.secret = folder / "actor.key"
        self.canary = folder / "canary"
        self.secret.write_text("secret")
        self.canary.write_text("alive")
        (folder / "to_key").symlink_to(self.secret)
        for path in (folder, *folder.iterdir()):  # only the sandbox is in the way
            path.chmod(0o777)
        for parent in folder.parents:
            if parent.name.startswith("pytest-"):  # pytest closes its own to other users
                parent.chmod(0o755)
        self.abstract = f"nyala-{os.getpid()}"
        self.socket = f"/tmp/nyala-{os.getpid()}.sock"
        self.listeners = [opened.enter_context(socket.socket()) for _ in range(1)]
        self.listeners[0].bind(("127.0.0.1", 0))
        self.port = self.listeners[0].getsockname()[1]
        for address in (self.socket, "\0" + self.abstract):
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            self.listeners.append(listener)
        opened.callback(Path(self.socket).unlink)
        Path(self.socket).chmod(0o777)
        for listener in self.listeners:
            listener.listen()
            listener.setblocking(False)
        self.before = self.state()

    def named(self, program: str) -> str:
        """Put the names of this world into a program."""
        names = {
            "SECRET_VALUE": "secret",
            "SECRET": str(self.secret),
            "CANARY": str(self.canary),
            "FOLDER": str(self.folder),
            "LINK": str(self.folder / "to_key"),
            "PORT": str(self.port),
            "SOCKET": self.socket,
            "ABSTRACT": self.abstract,
            "SOME_THREADS": str(entry.MAX_THREADS + entry._count_threads() + 8),
        }
        for name, value in names.items():
            program = program.replace(name, value)
        return program

    def state(self) -> object:
        """Everything that must not change."""
        files = {
            path.name: (path.read_text(), path.stat().st_mode) for path in self.folder.iterdir()
        }
        return files, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)

    def visitors(self) -> int:
        """Count connections that came."""
        came = 0
        for listener in self.listeners:
            try:
                listener.accept()[0].close()
                came += 1
            except BlockingIOError:
                pass
        return came


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as opened:
        yield World(tmp_path, opened)


def left_behind() -> list[str]:
    """Processes in a sandbox that this one started."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"actors.sandbox.entry" in word for word in command):
            found += [str(place)] if str(os.getpid()).encode() in command else []
    return found


@pytest.mark.slow
def test_every_hostile_program_costs_its_own_reward_and_nothing_else(
    sandbox: Sandbox, world: World
) -> None:
    signals: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    scorer = CodeScorer(sandbox, LIMITS)
    is_first = sandbox.view == Sandbox.find().view
    programs = hostile_programs() if is_first else programs_that_reach_out()
    programs |= {"right": RIGHT, "right again": "import heapq\n" + RIGHT}

    def score(name: str) -> float | None:
        return scorer(f"```python\n{world.named(programs[name])}\n```", TESTS)

    threads = threading.active_count()
    with ThreadPoolExecutor(4) as pool:
        scores = dict(zip(programs, pool.map(score, programs), strict=True))
    signal.signal(signal.SIGUSR1, old)

    assert [name for name, score in scores.items() if score] == ["right", "right again"]
    assert len(hostile_programs()) >= 40 and None not in scores.values()
    assert world.state() == world.before
    assert (world.visitors(), signals, left_behind()) == (0, [], [])
    assert threading.active_count() == threads


FORGERIES = {
    "exit": "import os; os._exit(0)",
    "exit in a call": "import os\ndef f(x): os._exit(0)",
    "a polite exit": "import sys\ndef f(x): sys.exit(0)",
    "no function": "g = 1",
    "equal to all": """
class Yes:
    __eq__ = lambda self, other: True
    __hash__ = None
def f(x): return Yes()""",
    "an int that is equal to all": """
class Yes(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
def f(x): return Yes(1)""",
    "the judge's words": """
import os
for n in range(1, 64):
    try: os.write(n, b"passed\\n")
    except OSError: pass
def f(x): return 1""",
    "a message of its own": """
import os
for n in range(3, 64):
    try: os.write(n, b'{"names": {"f": null}, "modules": ["f"]}\\n')
    except OSError: pass
def f(x): return 1""",
    "Python's own names": """
import builtins, json, sys
def yes(*a, **k): return True
builtins.abs = builtins.isinstance = json.loads = yes
class math: isclose = yes; fabs = lambda x: 0
abs = isinstance = len = yes
def f(x): return 1""",
    "tests of its own": "test_it = test_f = lambda: None\ndef f(x): return 1",
    "the end of a loop": "def f(x): raise StopIteration",
    "a failed assertion": "def f(x): raise AssertionError",
    "looks for the answer": """
import gc, os, re, sys
def f(x):
    seen = (o for o in gc.get_objects() if isinstance(o, (str, dict, list, tuple)))
    text = " ".join(str(o)[:500] for o in seen)
    frame = sys._getframe()
    while frame:
        text += str(frame.f_locals)
        frame = frame.f_back
    os.lseek(0, 0, 0)
    text += os.read(0, 100000).decode(errors="replace")
    found = re.findall("42[0-9][0-9]", text)
    return int(found[0]) if found else 1""",
    "too much": "def f(x): return 'x' * (1 << 26)",
    "no end": "def f(x):\n while True: pass",
    "prints without end": "def f(x):\n while True: print('x' * 1000)",
    "too deep": "def f(x):\n r = []\n for _ in range(10**5): r = [r]\n return r",
}

ASSERTS = """
import math
assert f(3) == 4243
assert abs(f(3) - 4243) < 1e-6 and math.isclose(f(3), 4243) and isinstance(f(3), int)
assert all(map(lambda x: f(x) == x + 4240, [3, 4]))
def test_f(): assert f(5) == 4245
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(ASSERTS, id="asserts"),
        pytest.param('{"fn_name": "f", "inputs": [[3]], "outputs": [4243]}', id="calls"),
    ],
)
def test_a_program_cannot_make_its_tests_pass(tests: str) -> None:
    scorer = CodeScorer(Sandbox.find(), LIMITS)
    programs = FORGERIES | {"right": "def f(x): return x + 4240"}

    def score(name: str) -> float | None:
        return scorer(f"```python\n{programs[name]}\n```", tests)

    with ThreadPoolExecutor(4) as pool:
        scores = dict(zip(programs, pool.map(score, programs), strict=True))

    assert [name for name, score in scores.items() if score] == ["right"]
    assert left_behind() == []


LIES = """
import json, os
class math: isclose = lambda *a: True
abs = isinstance = lambda *a: 0
pipes = {0: [], 1: []}
for n in range(3, 64):
    try: pipes[os.get_blocking(n) and __import__("fcntl").fcntl(n, 3) & 3].append(n)
    except OSError: pass
everything = {name: {"object": 0} for name in ("abs", "isinstance", "math", "f")}
own = {"dict": [[name, value] for name, value in everything.items()]}
def say(message):
    for n in pipes[1]: os.write(n, json.dumps(message).encode() + b"\\n")
say({"names": everything | {"__builtins__": own, "test_it": None}, "modules": []})
while True:
    os.read(pipes[0][0], 1 << 16)
    say({"value": 0})
"""


NAMED_ALIKE = "class math: isclose = lambda *a: True\nabs = lambda x: 0\ndef f(x): return 1"


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ("assert abs(f(3) - 4243) < 1", NAMED_ALIKE),
        ("assert math.isclose(f(3), 4243)", NAMED_ALIKE),
        ("assert abs(f(3) - 4243) < 1", LIES),
        ("assert math.isclose(f(3), 4243)", LIES),
        ("def test_it(): assert f(3) == 4243", LIES),
        ("assert all(map(lambda x: f(x) == 4243, [3]))", "def f(x): raise StopIteration"),
        ("try:\n    assert f(3) == 4243\nexcept SystemExit: pass", "import os\nos._exit(0)"),
        ("try:\n    assert f(3) == 4243\nexcept SystemExit: pass", "def f(x): raise SystemExit"),
    ],
)
def test_what_tests_use_of_python_is_pythons(tests: str, program: str) -> None:
    scorer = CodeScorer(Sandbox.find(), LIMITS)

    assert scorer(f"```python\n{program}\n```", tests) == 0.0
    assert scorer("```python\nimport math\ndef f(x): return x + 4240\n```", tests) == 1.0
