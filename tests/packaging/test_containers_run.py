"""`tests/containers/run` stops its engine however the stages end, and ends with their code.

Engine and stages are stand-ins, and whoever runs the test is root to it: only the shell is real.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "containers" / "run"
STAGES = "#!/bin/sh\necho stages >>calls\n%s\n"
FOR_LONG = "exec sleep 60"


def start(folder: Path, stages: str) -> subprocess.Popen[bytes]:
    """Run it in a session of its own, in a copy of the checkout; it notes its calls there."""
    programs = {
        "tests/containers/engine.sh": '#!/bin/sh\necho "$1" >>calls\n',
        ".venv/bin/python": STAGES % stages,
        "bin/id": "#!/bin/sh\necho 0\n",
    }
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(RUN, folder / "tests" / "containers" / "run")
    return subprocess.Popen(
        # An interrupt that we ignore, as a worker of tests may, would be ignored there too.
        ["env", "--default-signal", folder / "tests" / "containers" / "run"],
        env={"PATH": f"{folder}/bin:{os.environ['PATH']}"},
        start_new_session=True,
    )


def calls(folder: Path) -> list[str]:
    noted = folder / "calls"
    return noted.read_text().split() if noted.exists() else []


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_code_is_that_of_the_stages(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, f"exit {code}").wait(30) == code
    assert calls(tmp_path) == ["install", "start", "stages", "stop"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_of_all_stops_the_engine_and_is_no_success(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with start(tmp_path, FOR_LONG) as running:
        while "stages" not in calls(tmp_path):
            assert running.poll() is None
        os.killpg(running.pid, number)

        assert running.wait(30) == code
    assert calls(tmp_path)[-1] == "stop"


def test_a_failure_of_the_engine_to_stop_is_no_success(tmp_path: Path) -> None:
    engine = "cat >tests/containers/engine.sh <<'X'\n#!/bin/sh\nexit 1\nX"

    assert start(tmp_path, engine).wait(30) == 1
