"""Real processes: their group, log and end, and that a killed `nyala up` leaves none."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from configs.json_lines import JsonLinesFollower
from console.run import process as process_log
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard, follow
from console.run.supervisor import StopSignals
from tests.console.support.recorded_groups import Groups
from tests.waiting import is_alive, read_pid, wait_until

IDLE = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WITH_CHILD = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
pathlib.Path(sys.argv[1]).write_text(f"{child.pid}\\n")
print("hello", file=sys.stderr, flush=True)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start_process(program, *arguments, watch=None):
        command = Command(
            "x",
            "actor",
            (sys.executable, "-c", program, *map(str, arguments)),
            tmp_path / "logs" / "x.log",
            dict(os.environ),
        )
        process = Process(command, watch or Groups())
        process.start()
        started.append(process)
        return process

    yield start_process
    for process in started:
        process.kill()


def test_the_exit_code_and_the_signal_that_ended_a_process_are_known(start):
    done, killed = start("raise SystemExit(3)"), start(IDLE)
    assert killed.poll() is None

    os.kill(killed.pid, signal.SIGKILL)

    wait_until(lambda: done.poll() == 3)
    wait_until(lambda: killed.poll() == -9)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_starts_while_we_are_asked_to_stop_is_known(tmp_path, monkeypatch, number):
    groups = Groups()
    sleep = (sys.executable, "-c", IDLE)
    process = Process(Command("x", "actor", sleep, tmp_path / "x.log", dict(os.environ)), groups)
    popen = subprocess.Popen

    def interrupted(*arguments, **options):
        child = popen(*arguments, **options)
        os.kill(os.getpid(), number)
        return child

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        process.start()

    assert groups.calls == [("+", process.pid)]
    assert process.poll() is None
    process.kill()


def test_a_log_is_two_files_at_most_however_much_is_written(start, tmp_path, monkeypatch):
    monkeypatch.setattr(process_log, "MAX_LOG_BYTES", 2**16)
    followed = JsonLinesFollower(tmp_path / "logs" / "x.log")
    written, go = tmp_path / "written", tmp_path / "go"
    process = start(
        "import os, pathlib, sys, time\n"
        "def say(number): print('{\"number\": %d}' % number, file=sys.stderr, flush=True)\n"
        "for number in range(20000):\n"
        "    say(number)\n"
        "    while os.fstat(2).st_size > 2**17: time.sleep(0.01)\n"  # however late we look
        f"pathlib.Path({str(written)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "say(20000)\n"
    )
    seen: list[int] = []

    def look():
        ended = process.poll() is not None
        seen.extend(int(str(row["number"])) for row in followed.read_new())
        return ended

    wait_until(lambda: look() or written.exists())
    look()

    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert sizes.keys() == {"x.log", "x.log.1"}
    assert sizes["x.log.1"] == 2**16
    assert sizes["x.log"] <= 2**16
    monkeypatch.setattr(process_log, "MAX_LOG_BYTES", 2**20)  # the last line stays
    go.touch()
    wait_until(look)
    assert seen == sorted(seen)
    assert seen[-1] == 20000  # a reader that comes late misses lines and goes on


def test_output_is_appended_to_the_log_over_several_lives(start, tmp_path):
    process = start("import sys; print('one life', file=sys.stderr)")
    wait_until(lambda: process.poll() == 0)

    process.start()

    wait_until(lambda: process.poll() == 0)
    assert (tmp_path / "logs" / "x.log").read_text() == "one life\none life\n"


def test_asking_to_stop_sends_sigterm_to_the_leader(start, tmp_path):
    process = start(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    )
    wait_until(lambda: "ready" in (tmp_path / "logs" / "x.log").read_text())

    process.ask_to_stop()

    wait_until(lambda: process.poll() == 0)


def test_children_of_a_process_end_with_it(start, tmp_path):
    watch = Groups()
    process = start(WITH_CHILD, tmp_path / "pid", watch=watch)
    child = read_pid(tmp_path / "pid")

    wait_until(lambda: process.poll() == 0)

    wait_until(lambda: not is_alive(child))
    assert watch.calls == [("+", process.pid), ("-", process.pid)]


def test_killing_a_process_kills_its_children(start, tmp_path):
    process = start(WITH_CHILD + "signal.pause()", tmp_path / "pid")
    child = read_pid(tmp_path / "pid")

    process.kill()

    assert process.poll() == -9
    wait_until(lambda: not is_alive(child))


def test_the_guard_follows_what_began_and_ended():
    assert follow(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}


def ignored(status):
    """The signals that a process ignores, as bits."""
    [line] = [line for line in status.read_text().splitlines() if line.startswith("SigIgn:")]
    return int(line.split()[1], 16)


@pytest.mark.slow
def test_the_guard_is_told_to_end_too_and_removes_what_killed_processes_leave(tmp_path):
    program = STUBBORN + textwrap.dedent(
        """
        import pathlib, sys
        from broker.weights.shared_memory import SharedFolder
        folder = SharedFolder("victim", num_bytes=1, fallback=pathlib.Path(sys.argv[1]))
        print(folder.path, flush=True)
        signal.pause()
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    guard = ProcessGuard(grace_s=0.1)
    with subprocess.Popen(command, stdout=-1, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.is_dir()
        guard.add(owner.pid)
        status = Path(f"/proc/{guard._process.pid}/status")
        wait_until(lambda: ignored(status) >> (signal.SIGTERM - 1) & 1)
        guard._process.terminate()  # as all processes of a machine that goes down are

        guard.close()

        assert owner.wait() == -signal.SIGKILL
    assert not folder.exists()


@pytest.mark.slow
def test_the_guard_does_not_wait_until_somebody_asks_how_a_process_ended():
    guard = ProcessGuard(grace_s=60.0)
    command = [sys.executable, "-c", IDLE]
    with subprocess.Popen(command, start_new_session=True) as unasked:
        guard.add(unasked.pid)
        assert guard._process.stdin is not None
        guard._process.stdin.close()  # as when `nyala up` is killed

        assert guard._process.wait(30) == 0

        assert Path(f"/proc/{unasked.pid}").exists()  # we, its parent, have not asked
        assert unasked.wait() == -signal.SIGTERM


@pytest.mark.slow
def test_nothing_survives_a_killed_parent_not_even_what_ignores_sigterm(tmp_path):
    program = textwrap.dedent(
        f"""
        import os, pathlib, signal, sys
        from console.run.process_guard import ProcessGuard
        from console.run.process import Command, Process
        guard = ProcessGuard(grace_s=1.0)
        folder = pathlib.Path(sys.argv[1])
        stubborn = {STUBBORN!r} + {WITH_CHILD!r} + "signal.pause()"
        for name, code in (("meek", {IDLE!r}), ("stubborn", stubborn)):
            arguments = (sys.executable, "-c", code, str(folder / "child"))
            command = Command(name, "actor", arguments, folder / "log", dict(os.environ))
            process = Process(command, guard)
            process.start()
            (folder / name).write_text(f"{{process.pid}}\\n")
        signal.pause()
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    pids = [read_pid(tmp_path / name) for name in ("meek", "stubborn", "child")]
    assert all(is_alive(pid) for pid in pids)

    parent.kill()
    parent.wait()

    wait_until(lambda: not any(is_alive(pid) for pid in pids))
