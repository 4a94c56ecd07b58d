"""Environments in a process and a Python of their own: the same answers, and every way to fail."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from actors.environments.base import Score, Step
from actors.environments.calls import call
from actors.environments.hosted import environment as hosts
from actors.environments.hosted.environment import HostedEnvironment
from actors.environments.hosted.process import HostError, HostProcess
from actors.environments.registry import make_environment, try_environment
from configs.errors import SettingsError
from configs.hashes import run_hashes
from configs.settings import RunSettings
from configs.user_code import ROOT
from tests.waiting import wait_until

SOURCE = '''
import asyncio, os, random, subprocess, sys, threading
from actors.environments.base import Score, Segment, Step
import clash

print("printed while it is imported")
assert clash.VERSION == 2 and "pydantic" not in sys.modules and "torch" not in sys.modules

class Guess:
    def __init__(self, highest=9):
        self.highest = highest
    def reset(self, *, seed=None):
        self.secret = random.Random(seed).randint(1, 10**9)
        print("printed"); os.write(1, b"written"); subprocess.run(["echo", "echoed"])
        return f"1-{self.highest}? {self.secret}", {"secret": self.secret}
    def step(self, action):
        if action == "raise":
            raise ValueError("no")
        if action == "exit":
            os._exit(5)
        if action == "hang":
            threading.Event().wait()
        if action == "large":
            return "x" * 20_000_000, 0.0, False, {}
        if action == "garbage":
            for number in range(200, 210):
                try:
                    os.write(number, b"\\0\\0\\0\\2[]")
                except OSError:
                    pass
            threading.Event().wait()
        return "more", 0.5, action == "end", {"is_success": True}

class Unready(Guess):
    def __init__(self):
        raise RuntimeError("no table")

class Own:
    """Of our own form, with methods that wait."""
    can_replay = False
    def begin(self, index, seed, *, held_out):
        return Talk(index, held_out)
    def describe(self):
        return "own 1"

class Talk:
    answer = "7"
    demonstration = (Segment("7", True),)
    def __init__(self, index, held_out):
        self.prompt = [{"role": "user", "content": f"{index} {held_out}?"}]
        self.columns = {"said": 0}
    async def step(self, text):
        if text == "wait":
            await asyncio.Event().wait()
        self.columns["said"] += 1
        return Step([{"role": "tool", "content": text}], done=text == "7")
    async def score(self):
        return Score(1.0, {"exact": 1.0}, {"said": 1})

class Row:
    """Of skyrl-gym's form."""
    def __init__(self, env_config, extras):
        self.level = extras["level"]
    def init(self, prompt):
        return prompt, {}
    def step(self, text):
        return {"observations": [], "reward": self.level, "done": True, "metadata": {}}

class Tools:
    def reset(self, **row):
        return None
    def look(self) -> str:
        """Look."""
        return "nothing"
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but another version of a package than ours."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "clash.py").write_text("VERSION = 2\n")
    (packages / "clash-2.1.dist-info").mkdir()
    (packages / "clash-2.1.dist-info" / "METADATA").write_text("Name: clash\nVersion: 2.1\n")
    return folder / "bin" / "python"


@pytest.fixture
def run(python: Path, tmp_path: Path) -> Callable[..., RunSettings]:
    (tmp_path / "env.py").write_text(SOURCE)

    def run(name: str, **settings: Any) -> RunSettings:
        given = {"environment": f"{tmp_path}/env.py:{name}", "environment_python": str(python)}
        return RunSettings(model="init", **given | settings)

    return run


def hosted(run: RunSettings, **options: Any) -> HostedEnvironment:
    environment = make_environment(run, **options)
    assert isinstance(environment, HostedEnvironment)
    return environment


def begin(
    environment: HostedEnvironment, index: int = 1, *, held_out: bool = False
) -> Awaitable[Any]:
    return call(environment.begin, index, 0, held_out=held_out, limit_s=20)


def step(conversation: Any, text: str, limit_s: float = 20) -> Awaitable[Any]:
    return call(conversation.step, text, limit_s=limit_s)


def test_a_class_of_another_project_plays_beside_packages_of_its_own(
    run: Callable[..., RunSettings],
) -> None:
    environment = hosted(run("Guess", environment_settings={"highest": 3}))

    async def story() -> None:
        first, again = await begin(environment), await begin(environment)
        assert first.prompt == again.prompt == f"1-3? {first.columns['secret']}"
        assert (await begin(environment, held_out=True)).prompt != first.prompt
        assert await step(first, "7") == Step("more", done=False)
        assert await step(first, "end") == Step("", done=True)
        assert await call(first.score, limit_s=20) == Score(1.0, {"exact": 1.0})

    asyncio.run(story())
    assert environment.describe().startswith("games of") and environment.can_replay


def test_our_own_form_is_awaited_and_knows_what_it_was_told(
    run: Callable[..., RunSettings],
) -> None:
    sample, source = try_environment(run("Own"))
    environment: Any = source.make()

    async def story() -> None:
        talk = await begin(environment, 4)
        assert (talk.prompt[0]["content"], talk.answer) == ("4 False?", "7")
        assert talk.demonstration == (("7", True),)
        assert await step(talk, "?") == Step([{"role": "tool", "content": "?"}], done=False)
        assert (await step(talk, "7")).done
        assert await call(talk.score, limit_s=20) == Score(1.0, {"exact": 1.0}, {"said": 1.0})
        assert talk.columns == {"said": 2}
        with pytest.raises(HostError, match=r"within 0\.1 s.*environment_timeout_s"):
            await step(talk, "wait", 0.1)

    asyncio.run(story())
    assert source.is_async and not environment.can_replay
    assert sample.answer == "7"


@pytest.mark.parametrize(("answer", "reward"), [(None, 3.0), ("answer", 3.0)])
def test_rows_stay_with_the_actor(
    run: Callable[..., RunSettings], tmp_path: Path, answer: str | None, reward: float
) -> None:
    row = {"question": "1+1=", "answer": "2", "level": 3}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    given = {"path": f"{tmp_path}/rows.jsonl", "prompt": "question", "answer": answer}
    given["factory"] = f"{tmp_path}/env.py:Row"
    given["held_out"] = given["path"]
    environment = hosted(run("", environment="dataset", environment_settings=given))

    async def story() -> None:
        episode = await begin(environment, held_out=True)
        assert episode.prompt[0]["content"].startswith("1+1=") and episode.columns == row
        assert (await step(episode, "2")).done
        assert (await call(episode.score, limit_s=20)).reward == reward

    asyncio.run(story())


def test_what_fails_costs_its_own_episode(run: Callable[..., RunSettings], tmp_path: Path) -> None:
    environment = hosted(run("Guess"), workers=3)

    async def story() -> None:
        good, bad = await begin(environment, 1), await begin(environment, 2)
        with pytest.raises(HostError, match=r"ValueError: no, at .*env\.py:18: `raise Value"):
            await step(bad, "raise")
        with pytest.raises(HostError, match=r"must be at most 16,777,216 bytes, got 20,000"):
            await step(bad, "large")
        with pytest.raises(
            HostError, match=r"within 0\.2 s, got no answer, at .*env\.py:22: `threading\.Event"
        ):
            await step(bad, "hang", 0.2)
        assert not (await step(good, "7")).done
        assert not (await step(bad, "7")).done

    asyncio.run(story())


def test_a_host_that_dies_fails_its_episodes_and_is_started_again_some_times(
    run: Callable[..., RunSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "PAUSE_S", 0.01)
    monkeypatch.setattr(hosts, "MOST_DEATHS", 2)
    environment = hosted(run("Guess"))

    async def story() -> None:
        first, other = await begin(environment, 1), await begin(environment, 2)
        with pytest.raises(HostError, match="environment host: it ended with status 5"):
            await step(first, "exit")
        with pytest.raises(HostError, match="it ended with status 5"):
            await step(other, "7")
        second = await begin(environment, 1)
        assert second.prompt == first.prompt
        with pytest.raises(HostError, match="wrote into the answers of its host"):
            await step(second, "garbage")
        third = await begin(environment, 1)
        os.kill(third.process.pid, signal.SIGKILL)
        with pytest.raises(HostError, match="ended with status -9"):
            await step(third, "7")
        with pytest.raises(HostError, match=r"Guess, .* died 3 times .* because it end.*; mend"):
            await begin(environment, 1)

    asyncio.run(story())


@pytest.mark.slow
def test_a_host_that_is_silent_is_ended(
    run: Callable[..., RunSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 1.5)
    environment = hosted(run("Guess"))

    async def story() -> None:
        episode = await begin(environment, 1)
        os.kill(episode.process.pid, signal.SIGSTOP)
        with pytest.raises(HostError, match="it has been silent for"):
            await step(episode, "7", 0.5)

    asyncio.run(story())


def test_a_host_whose_calls_never_end_is_given_up(run: Callable[..., RunSettings]) -> None:
    environment = hosted(run("Guess"), workers=1)

    async def story() -> None:
        episode = await begin(environment)
        for _ in range(3):
            with pytest.raises(HostError, match="got no answer"):
                await step(episode, "hang", 0.2)
        with pytest.raises(HostError, match="too many of its calls never end"):
            await step(episode, "hang", 0.2)

    asyncio.run(story())


def test_a_host_ends_with_its_parent(python: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(python)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not _runs(pid))


PARENT = """
import signal, sys
from pathlib import Path
from actors.environments.hosted.process import HostProcess
process = HostProcess(Path(sys.argv[1]), threads=1)
process.submit("versions", packages=[]).result(30)
print(process.pid, flush=True)
signal.pause()
"""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "settings", "answer"),
    [
        ("Guess", {"environment_requirements": ["clash>=3"]}, r"got clash 2\.1 for 'clash>=3'"),
        ("Guess", {"environment_requirements": ["absent"]}, "got absent not installed for"),
        ("Guess", {"environment_requirements": ["-r x"]}, "must be packages as pip takes them"),
        ("Guess", {"environment_python": "/none/python"}, r"there is no /none/python\); make"),
        ("Guess", {"environment_python": "/etc/hostname"}, "it cannot be started"),
        ("Guess", {"environment_settings": {"lowest": 1}}, "unexpected keyword argument 'lowest'"),
        ("Guess", {"environment": "calculator"}, "is a class of yours, got calculator"),
        ("Guess", {"environment": "no_such:Env"}, "must be in an importable module, got 'no_such"),
        ("Unready", {}, "RuntimeError: no table"),
        ("Tools", {"reward": "rewards.py:f"}, "add it to run.environment_requirements"),
    ],
)
def test_what_cannot_be_made_is_refused(
    run: Callable[..., RunSettings], name: str, settings: dict[str, Any], answer: str
) -> None:
    with pytest.raises(SettingsError, match=answer):
        make_environment(run(name, **settings))


def test_a_python_that_is_too_old_is_refused(
    run: Callable[..., RunSettings], tmp_path: Path
) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 79\n")
    old.chmod(0o755)

    with pytest.raises(SettingsError, match=r"its Python is older than 3\.11"):
        make_environment(run("Guess", environment_python=str(old)))


def test_what_is_required_is_installed_by_uv_once(
    run: Callable[..., RunSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Path(sys.executable).parent
    if shutil.which("uv") is None and shutil.which("uv", path=str(beside)) is None:
        pytest.skip("uv is not installed")
    wheel = tmp_path / "clash-2.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("clash.py", "VERSION = 2\n")
        file.writestr(
            "clash-2.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: clash\nVersion: 2.1\n"
        )
        file.writestr(
            "clash-2.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("clash-2.1.dist-info/RECORD", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"environment_python": None, "environment_requirements": [f"clash @ file://{wheel}"]}

    made = hosted(run("Guess", **given))
    wheel.unlink()
    again = hosted(run("Guess", **given))

    assert made.describe() == again.describe()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/none/python")
    with pytest.raises(SettingsError, match=r"must be installed by uv, got none on this machine"):
        make_environment(run("Guess", **given | {"environment_requirements": ["other"]}))


def test_a_module_that_only_its_own_python_has_can_be_hashed(
    run: Callable[..., RunSettings],
) -> None:
    first = run_hashes(run("Guess", environment="no_such:Env"))
    other = run_hashes(run("Guess", environment="no_such:Env", environment_python="/other"))

    assert first == other
    required = run("Guess", environment="no_such:Env", environment_requirements=["a>=1"])
    assert run_hashes(required)["settings"] != first["settings"]


def test_a_process_answers_nothing_after_its_end(python: Path) -> None:
    process = HostProcess(python, threads=1)
    assert process.submit("versions", packages=["clash"]).result(30) == {"clash": "2.1"}

    process.kill("enough")

    with pytest.raises(HostError, match="enough"):
        process.submit("versions", packages=[])
