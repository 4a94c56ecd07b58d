"""`import nyala`: runs of a script, with stand-ins for the roles; one run is real."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nyala
from configs.errors import DeadlineError
from console import api
from console.run.run_folder import RunFolder
from tests.console.support.stand_in_up import MODULE
from tests.waiting import wait_until

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[3]
SETTINGS = """
run: {{name: r, directory: "{directory}", model: init, environment: calculator, steps: {steps}}}
broker: {{endpoint: "tcp://127.0.0.1:0"}}
actors: {{count: 1, engine: torch}}
console: {{refresh_s: 0.05, stop_timeout_s: 5}}
"""
LONG = 2000  # batches of a run that does not end within a test


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("NYALA_REDIS_URL", raising=False)
    monkeypatch.setattr(api, "UP", (*MODULE, "{}"))
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mine.yaml"
    path.write_text(SETTINGS.format(directory=tmp_path / "runs", steps=6))
    yield path
    nyala.Run(tmp_path / "runs" / "r").stop()


def script(config, *lines, **flags):
    """Start a Python program that creates a run of `LONG` batches and then does something."""
    given = ", ".join(f"{name}={value!r}" for name, value in flags.items())
    text = "\n".join(
        [
            "import threading, nyala",
            "from tests.console.support.stand_in_up import use_stand_ins",
            "use_stand_ins()",
            f"run = nyala.create_run({str(config)!r}, run={{'steps': {LONG}}}, {given})",
            "print(run.state, flush=True)",
            *lines,
        ]
    )
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=-1,
        stderr=-1,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def test_a_run_of_which_a_process_needs_other_settings_raises_what_it_wrote(config, monkeypatch):
    monkeypatch.setattr(api, "UP", (*MODULE, '{"broker": "refuses"}'))

    with pytest.raises(nyala.SettingsError, match=r"must be good, got bad(.|\n)*needs something"):
        nyala.create_run(config).wait(quiet=True)


def test_a_run_is_created_waited_for_and_read(config, capsys):
    run = nyala.create_run(config, run={"steps": 8})

    assert (run.id, run.state, run.is_running) == ("r", "running", True)
    with pytest.raises(nyala.SettingsError, match="must have finished to have a model"):
        _ = run.model_path
    with pytest.raises(DeadlineError, match="r must finish within 0 s"):
        run.wait(0, quiet=True)
    summary = run.wait()

    assert summary["steps"] == 8
    assert run.state == "finished"
    assert [row["step"] for row in run.metrics] == list(range(1, 9))
    assert run.evaluations[-1]["accuracy"] == 1.0
    assert run.model_path == run.folder / "model"
    assert run.report == f"file://{run.folder}/report.html"
    assert "held-out accuracy after" in capsys.readouterr().out
    again = nyala.open_run(run.folder)
    assert (again.state, again.wait(), again.metrics) == ("finished", summary, run.metrics)


def test_a_stopped_run_goes_on_where_it_was(config):
    run = nyala.create_run(config, run={"steps": 60})
    wait_until((run.folder / "checkpoints" / "step-000005").exists)

    run.stop()

    assert run.state == "unfinished"
    with pytest.raises(nyala.NyalaError, match="one that was stopped"):
        run.wait(quiet=True)
    done = len(run.metrics)
    assert 5 <= done < 60
    again = nyala.create_run(config, run={"steps": 60})
    assert again.wait(quiet=True)["steps"] == 60


def test_a_run_ends_with_the_program_that_created_it(config, tmp_path):
    with script(config, "raise SystemExit(3)") as program:
        out, err = program.communicate(timeout=60)

    assert (program.returncode, out) == (3, "running\n")
    assert "nyala: this Python ends, and the run with it" in err
    assert not RunFolder(tmp_path / "runs" / "r").is_held


def test_a_run_ends_with_a_program_that_is_killed(config, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "r")
    with script(config, "threading.Event().wait()") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        assert folder.is_held

        program.kill()

    wait_until(lambda: not folder.is_held)


def test_an_interrupt_ends_the_waiting_and_not_the_run(config, tmp_path):
    lines = [
        "try:",
        "    print('waiting', flush=True)",
        "    run.wait()",
        "except KeyboardInterrupt:",
        "    done = len(run.metrics)",
        "while len(run.metrics) < done + 20:",
        "    assert run.is_running",
        "print('goes on')",
    ]
    with script(config, *lines) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        assert program.stdout.readline() == "waiting\n"
        os.killpg(program.pid, signal.SIGINT)  # as a terminal and a notebook's kernel do
        out, _ = program.communicate(timeout=60)

    assert out.endswith("goes on\n")


def test_a_detached_run_goes_on_without_the_program(config, tmp_path):
    with script(config, detached=True) as program:
        out, err = program.communicate(timeout=60)

    assert (program.returncode, out, err) == (0, "running\n", "")
    run = nyala.open_run(tmp_path / "runs" / "r")
    assert run.is_running
    run.stop()
    assert run.state == "unfinished"


def test_wrong_settings_are_refused_before_anything_starts(config, tmp_path):
    with pytest.raises(nyala.SettingsError, match=r"learner\.lr"):
        nyala.create_run(config, learner={"lr": -1})
    with pytest.raises(nyala.SettingsError, match="learner must be a table of settings, got 3"):
        nyala.create_run(config, learner=3)  # type: ignore[arg-type]
    with pytest.raises(nyala.SettingsError, match="reward"):
        nyala.create_run(config, run={"reward": "missing.py:reward"})
    assert not (tmp_path / "runs" / "r").exists()


def test_a_run_that_fails_says_why(config, monkeypatch):
    monkeypatch.setattr(api, "UP", (*MODULE, '{"learner": "refuses"}'))

    run = nyala.create_run(config)

    with pytest.raises(nyala.NyalaError, match=r"run\.reward must be good, got bad"):
        run.wait(quiet=True)


SCRIPT = """
import nyala

run = nyala.create_run(
    "{preset}",
    run={{"name": "first", "directory": "runs", "steps": 3, "eval_every": 3}},
    learner={{"lr": 1e-4, "checkpoint_every": 3}},
)
summary = run.wait()
print("batches", summary["steps"], len(run.metrics))
print("answers", len({{line.question for line in run.samples(kind="eval")}}) > 4)
print("model", (run.model_path / "config.json").exists())
"""


def test_a_script_as_a_user_would_write_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(preset=ROOT / "configs" / "tiny.yaml"))

    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "NYALA_REDIS_URL"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("batches 3 3\nanswers True\nmodel True\n")
    first = tmp_path / "runs" / "first"
    assert (first / "report.html").exists()
    assert "| before | after 3 batches |" in (first / "model" / "README.md").read_text()
