"""`nyala stop`: the process that holds a run is asked to end, and waited for."""

import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from configs.loader import save
from configs.settings import RunSettings, Settings
from console.main import app
from console.run.run_folder import RunFolder
from learner.stopping import write_left_batch

HOLDER = """
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from console.run.run_folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])).locked():
    print("in", flush=True)
    got = signal.sigwait({signal.SIGTERM})
    time.sleep(0.3)
    sys.exit(f"got {int(got)}")
"""


@pytest.mark.slow
def test_the_process_of_a_run_is_stopped_and_waited_for(tmp_path):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    folder = settings.run.folder
    save(settings, folder / "config.yaml")
    RunFolder(folder).checkpoints.joinpath("step-000012").mkdir(parents=True)
    RunFolder(folder).redis.mkdir()
    write_left_batch(folder, 13)
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        assert holder.stdout.readline() == "in\n"

        answer = CliRunner().invoke(app, ["stop", str(folder)])

        assert answer.exit_code == 0, answer.output
        assert RunFolder(folder).holder is None
        assert f"stopping process {holder.pid}: actors drain" in answer.output
        assert "kept: step-000012; batch 13, which was under way, is trained again" in answer.output
        assert "stopped; to go on: " in answer.output
        assert holder.stderr.read() == f"got {int(signal.SIGTERM)}\n"
    again = CliRunner().invoke(app, ["stop", str(folder)])
    assert again.exit_code == 0
    assert "works on this machine" in again.output
    assert "not running: stopped since" in again.output
