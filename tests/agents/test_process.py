"""An agent's process has its limits, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from agents.process import (
    AgentProcess,
    MemoryMeter,
    command_of,
    environment_of,
    shared_environment,
)
from configs.errors import SettingsError
from configs.settings import AgentSettings
from tests.waiting import until, wait_until

PYTHON = sys.executable
FORKS_AWAY = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
time.sleep(float(sys.argv[2]))
"""

HOPS = """
import os, sys, time
end = time.monotonic() + 60  # whatever becomes of the test
if os.fork():
    time.sleep(float(sys.argv[1]))
    os._exit(0)
os.setsid()
log = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
while time.monotonic() < end:
    os.write(log, b".")
    if os.fork():
        os._exit(0)
"""
MANY = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for _ in range(8):  # 256 of them
    os.fork()
time.sleep(60)
"""


def run_agent(*command, timeout_s=30.0, memory_bytes=None, tell_when=None, **variables):
    async def tell(told):
        await until(tell_when)
        told.set()

    async def story():
        told = asyncio.Event()
        telling = asyncio.create_task(tell(told)) if tell_when is not None else None
        process = AgentProcess(
            command,
            {**os.environ, **variables},
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            meter=MemoryMeter(),
        )
        try:
            return await process.run(told)
        finally:
            if telling is not None:
                telling.cancel()

    return asyncio.run(story())


def has_text(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def runs(program: Path) -> bool:
    """Whether a process has this program among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            if str(program).encode() in path.read_bytes():
                return True
    return False


def test_an_agent_that_exits_with_0_has_ended_its_conversation():
    assert run_agent(PYTHON, "-c", "print(1)") == ("ended", "")


def test_an_agent_that_fails_says_why():
    end = run_agent(PYTHON, "-c", "print('x' * 5000); raise SystemExit('no such tool')")

    assert end.why == "died"
    assert end.text.startswith("exit code 1; its last output:\n")
    assert end.text.endswith("no such tool\n") or end.text.endswith("no such tool")
    assert len(end.text) == 2000


def test_an_agent_that_cannot_be_started_is_no_agent_that_exits_with_some_code(tmp_path):
    with pytest.raises(OSError, match=r"^/none/agent cannot be started: No such file"):
        run_agent("/none/agent")
    (tmp_path / "program").write_text("no program")
    with pytest.raises(OSError, match="cannot be started: Permission denied"):
        run_agent(str(tmp_path / "program"))

    assert run_agent("sh", "-c", "exit 127") == ("died", "exit code 127")
    assert run_agent("sh", "-c", "kill -USR1 $$") == ("died", "exit code 138")


@pytest.mark.parametrize(
    "makes",
    [
        "os.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0o500); os.symlink('/etc', 'etc')",
        "[(os.mkdir('a'), os.chdir('a')) for _ in range(1500)]",
    ],
    ids=["not writable", "deep"],
)
def test_a_folder_is_removed_whatever_is_in_it(tmp_path, monkeypatch, makes):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert run_agent(PYTHON, "-c", f"import os; {makes}") == ("ended", "")
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_its_folder_is_removed_and_not_followed(tmp_path, monkeypatch):
    kept, folders = tmp_path / "kept", tmp_path / "folders"
    kept.mkdir(mode=0o500)
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    code = f"import os; here = os.getcwd(); os.rmdir(here); os.symlink({str(kept)!r}, here)"

    assert run_agent(PYTHON, "-c", code) == ("ended", "")
    assert not list(folders.iterdir())
    assert stat.S_IMODE(kept.stat().st_mode) == 0o500


def test_a_pipe_that_nobody_reads_ends_a_program_of_an_agent():
    assert run_agent("bash", "-c", "yes | head -1 > /dev/null; exit ${PIPESTATUS[0]}") == (
        "died",
        "exit code 141",
    )


def test_a_folder_is_removed_although_no_process_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with pytest.raises(OSError, match="Argument list too long"):
        run_agent(PYTHON, X="x" * 2**20)

    assert not list(tmp_path.iterdir())


def test_an_agent_beyond_its_time_is_ended_although_it_ignores_signals():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True)\n"
    began = time.monotonic()
    end = run_agent(PYTHON, "-c", code + "time.sleep(60)", timeout_s=4.0)

    assert end.why == "timeout"
    assert end.text.startswith("no end within 4 s; its last output:\non")
    assert time.monotonic() - began < 20


def test_the_memory_of_all_processes_of_an_agent_counts():
    code = """
import os, time
for _ in range(3):
    if not os.fork():
        block = bytearray(60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    end = run_agent(PYTHON, "-c", code, memory_bytes=150 << 20)

    assert end.why == "memory"
    assert int(end.text.split()[2]) > 150


def test_reserved_memory_does_not_count():
    code = "import mmap, time; m = mmap.mmap(-1, 1 << 33); time.sleep(2.5)"

    assert run_agent(PYTHON, "-c", code, memory_bytes=100 << 20).why == "ended"


@pytest.mark.parametrize("lasts_s", ["5", "60"])
def test_processes_that_left_the_session_are_ended_with_the_agent(tmp_path, lasts_s):
    file = tmp_path / "pid"
    tell_when = (lambda: has_text(file)) if lasts_s == "60" else None
    end = run_agent(PYTHON, "-c", FORKS_AWAY, str(file), lasts_s, tell_when=tell_when)

    assert end.why == ("ended" if lasts_s == "5" else "died")
    assert not lives(int(file.read_text()))


@pytest.mark.parametrize("lasts_s", ["0.2", "60"])
def test_a_process_that_forks_and_exits_over_and_over_is_ended(tmp_path, lasts_s):
    log = tmp_path / "log"
    has_hopped = lambda: has_text(log) and len(log.read_text()) > 10  # noqa: E731
    run_agent(PYTHON, "-I", "-S", "-c", HOPS, lasts_s, str(log), tell_when=has_hopped)

    hops = log.stat().st_size
    time.sleep(1.0)
    assert log.stat().st_size == hops


@pytest.mark.parametrize("above", [1, 2], ids=["keeper", "guard"])
def test_an_agent_whose_keeper_is_killed_is_ended_with_all_that_it_began(tmp_path, above):
    file = tmp_path / "pid"
    code = f"""
import os, signal, subprocess, sys, threading
subprocess.Popen([sys.executable, "-c", {FORKS_AWAY!r}, {str(file)!r}, "60"])
while not os.path.exists({str(file)!r}) or not open({str(file)!r}).read():
    pass
keeper = os.getppid()
guard = int(open(f"/proc/{{keeper}}/stat").read().rpartition(")")[2].split()[1])
os.kill([keeper, guard][{above} - 1], signal.SIGKILL)
threading.Event().wait(60)
"""
    end = run_agent(PYTHON, "-c", code)

    assert end.why == "died"
    wait_until(lambda: not lives(int(file.read_text())))
    wait_until(lambda: not runs(file))


def test_an_agent_does_not_outlive_its_keepers_where_all_are_killed_at_once(tmp_path):
    file = tmp_path / "pid"
    code = f"""
import os, signal, time
open({str(file)!r}, "w").write(str(os.getpid()))
keeper = os.getppid()
guard = int(open(f"/proc/{{keeper}}/stat").read().rpartition(")")[2].split()[1])
for number in (signal.SIGSTOP, signal.SIGKILL):
    os.kill(guard, number)
    os.kill(keeper, number)
time.sleep(60)
"""
    began = time.monotonic()
    run_agent(PYTHON, "-c", code)

    wait_until(lambda: not lives(int(file.read_text())))
    assert time.monotonic() - began < 30


def test_a_keeper_that_its_agent_has_stopped_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("agents.process.KILLED_S", 0.0)
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)"
    began = time.monotonic()
    end = run_agent(PYTHON, "-c", code, timeout_s=3.0)

    assert end.why == "timeout"
    assert time.monotonic() - began < 30


def test_hundreds_of_processes_that_ignore_signals_are_ended(tmp_path):
    program = tmp_path / "many.py"
    program.write_text(MANY)
    end = run_agent(PYTHON, "-I", "-S", str(program), timeout_s=2.0)

    assert end.why == "timeout"
    assert not runs(program)


def test_endless_output_costs_its_end_alone():
    code = "import os\nfor _ in range(3000): os.write(1, bytes(2**16))\nprint('the end'); 1 / 0"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = run_agent(PYTHON, "-c", code)

    assert (end.why, len(end.text)) == ("died", 2000)
    assert "the end" in end.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_an_agent_that_closes_its_output_goes_on():
    code = "import os, time; os.close(1); os.close(2); time.sleep(1.5); os._exit(3)"
    began = time.monotonic()
    end = run_agent(PYTHON, "-c", code)

    assert end == ("died", "exit code 3")
    assert time.monotonic() - began > 1.4


def test_an_agent_is_ended_when_its_conversation_is():
    began = time.monotonic()
    after = time.monotonic() + 0.5
    tell_when = lambda: time.monotonic() > after  # noqa: E731
    run_agent(PYTHON, "-c", "import time; time.sleep(60)", tell_when=tell_when)

    assert time.monotonic() - began < 10


def test_its_folder_is_empty_at_first_and_removed_at_last(tmp_path):
    code = "import os, pathlib; print(os.getcwd(), os.listdir()); pathlib.Path('x').touch(); 1 / 0"
    folder, listed = run_agent(PYTHON, "-c", code).text.splitlines()[1].split(maxsplit=1)

    assert listed == "[]"
    assert not Path(folder).exists()


def test_a_host_that_is_killed_leaves_no_process_and_no_folder(tmp_path):
    program = f"""
import asyncio, os
from agents.process import AgentProcess, MemoryMeter
command = [{PYTHON!r}, "-c", {FORKS_AWAY!r}, {str(tmp_path / "away")!r}, "60"]
env = {{**os.environ, "TMPDIR": {str(tmp_path)!r}}}
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
asyncio.run(AgentProcess(command, env, timeout_s=60, memory_bytes=None, meter=MemoryMeter()).run(
    asyncio.Event()))
"""
    host = subprocess.Popen([PYTHON, "-c", program], cwd=Path(__file__).parents[2])
    try:
        away = wait_until(lambda: (tmp_path / "away").exists() and (tmp_path / "away").read_text())
        host.send_signal(signal.SIGKILL)
        host.wait()
        wait_until(lambda: not lives(int(away)))
        wait_until(lambda: not list(tmp_path.glob("nyala-agent-*")))
    finally:
        host.kill()


def test_its_environment_has_its_own_key_and_none_of_the_run():
    inherited = {"PATH": "/bin", "NYALA_REDIS_URL": "redis://:secret@h", "HOME": "/root"}
    inherited["NO_PROXY"] = "here"
    given = environment_of(
        "http://h/c/1", "k", b'{"q": 1}', python=Path("/venv/bin/python"), inherited=inherited
    )

    assert given == {
        "HOME": "/root",
        "PATH": "/venv/bin:/bin",
        "VIRTUAL_ENV": "/venv",
        "NO_PROXY": "here,h",
        "no_proxy": "h",
        "OPENAI_BASE_URL": "http://h/c/1/v1",
        "OPENAI_API_KEY": "k",
        "NYALA_TASK": '{"q": 1}',
    }


def test_an_agent_of_many_conversations_asks_the_door_without_a_proxy():
    given = shared_environment("http://h", python=None, inherited={"HTTP_PROXY": "http://p"})

    assert given == {"HTTP_PROXY": "http://p", "NO_PROXY": "h", "no_proxy": "h"}


def test_files_that_the_command_names_are_found_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    agents = AgentSettings(command="python agent.py --say 'a b.c'")

    assert command_of(agents, None) == ("python", str(tmp_path / "agent.py"), "--say", "a b.c")
    assert command_of(agents, Path("/v/bin/python"))[0] == "/v/bin/python"


@pytest.mark.parametrize(
    ("command", "text"),
    [("python 'x", "words as a shell takes them"), (None, "the command of an agent, got none")],
)
def test_a_command_that_is_none_is_refused(command, text):
    with pytest.raises(SettingsError, match=text):
        command_of(AgentSettings(command=command), None)
