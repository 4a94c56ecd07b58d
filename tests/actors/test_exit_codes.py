"""Exit codes of an actor's process, by which a scheduler decides whether it starts another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.settings import Settings
from console.run.redis_server import free_port
from console.verbs.fleet import render
from tests.broker.support.keys import keys_with_actor

ROOT = Path(__file__).parents[2]
ENDED = (  # stands in for an actor whose run ends: a ring of its own takes half a minute
    "import sys, actors.__main__ as process\n"
    "async def end(*_, **__): pass\n"
    "process.run_actor = end\n"
    "sys.exit(process.main(sys.argv[1:]))"
)


def settings_file(folder: Path) -> Path:
    """Settings of a run whose broker is not there: an actor asks for it until it is told to go."""
    tree = {
        "run": {"name": "far", "model": "init", "environment": "calculator"},
        "broker": {
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "keys": str(keys_with_actor(folder / "keys")),
        },
        "actors": {"engine": "torch"},
    }
    path = folder / "far.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def put_commands(folder: Path, **commands: str) -> str:
    """Write commands of a shell, and return the PATH with which they are found first."""
    (folder / "bin").mkdir()
    for name, text in commands.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def start_job(folder: Path, nyala: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the recipe as Slurm's batch step does; `srun` and `scontrol` are stood in for."""
    settings = Settings.model_validate({"run": {"name": "far", "model": "m"}})
    render(settings, "slurm", folder / "slurm")
    (folder / "slurm" / "hub").write_text("hub.example.org\n")
    path = put_commands(folder, srun='exec "$@"', scontrol='echo "$@" >> asked', nyala=nyala)
    return subprocess.Popen(
        [str(folder / "slurm" / "actor.sh"), *arguments],
        cwd=folder,
        env=os.environ
        | {"PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def asked_of_slurm(folder: Path) -> str:
    file = folder / "asked"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("code", "asked"),
    [(0, ""), (1, ""), (2, ""), (75, "requeue 7\n"), (143, "requeue 7\n")],
)
def test_a_job_is_requeued_where_its_actor_was_told_to_go(
    tmp_path: Path, code: int, asked: str
) -> None:
    job = start_job(tmp_path, f'echo "$@"; exit {code}', "--set", "run.seed=1")

    written, _ = job.communicate(timeout=60)

    slurm = tmp_path / "slurm"
    assert written == (
        f"actor --config={slurm}/config.yaml --set broker.endpoint=tcp://hub.example.org:5757 "
        f"--set broker.keys={slurm}/keys --set run.seed=1 --set actors.exit_when_told=75\n"
    )
    assert job.returncode == code
    assert asked_of_slurm(tmp_path) == asked


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_actor_that_is_told_to_go_ends_with_the_code_that_requeues_its_job(
    tmp_path: Path,
) -> None:
    nyala = f'exec "{sys.executable}" -c "from console.main import app; app()" "$@"'
    far = yaml.safe_load(settings_file(tmp_path).read_text())["broker"]
    changes = [word for name in far for word in ("--set", f"broker.{name}={far[name]}")]
    changes += ["--set", "actors.engine=torch"]
    job = start_job(tmp_path, nyala, *changes)
    assert job.stdout is not None
    with job:
        begun = ""
        while "looking for the broker" not in begun and (line := job.stdout.readline()):
            begun += line
        # As Slurm does: to the step, not to the batch shell.
        (step,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(step), signal.SIGTERM)
        written = begun + job.communicate(timeout=60)[0]

    assert job.returncode == 75, written
    assert asked_of_slurm(tmp_path) == "requeue 7\n"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_actor_whose_run_has_ended_is_not_to_be_started_again(tmp_path: Path) -> None:
    flags = (f"--config={settings_file(tmp_path)}", "--set", "actors.exit_when_told=75")

    done = subprocess.run(
        [sys.executable, "-c", ENDED, *flags],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
