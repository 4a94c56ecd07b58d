"""A run that was stopped: what each verb says of it, since its store has gone with it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from configs.loader import save
from configs.secrets import write_secret
from console.api import Run
from console.doctor.implied import settings_checks
from console.main import app
from console.report.record import read_run
from console.report.sections import headline
from console.run.run_folder import RunFolder
from tests.console.support.recorded_run import FOLDER, rows
from tests.learner.support.tiny_run import tiny_settings

STOPPED_AT = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
SINCE = "2026-03-04 05:06:07"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a store of its own, stopped at the last batch of a recorded one."""
    settings = tiny_settings(tmp_path)
    folder = RunFolder(settings.run.folder)
    save(settings, folder.config)
    folder.redis.mkdir()
    write_secret(folder.redis_url, "redis://:x@127.0.0.1:1/0")
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    shutil.copy(FOLDER.evaluations, folder.evaluations)
    folder.log("learner").parent.mkdir()
    for name, seconds in (("learner", 0), ("broker", -9)):
        folder.log(name).touch()
        os.utime(folder.log(name), (STOPPED_AT + seconds,) * 2)
    os.utime(folder.config, (STOPPED_AT - 3600,) * 2)
    return folder


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["status"], 0),
        (["stop"], 0),
        (["buffer", "stats"], 2),
        (["buffer", "dead", "list"], 2),
        (["buffer", "resume"], 2),
        (["weights", "pull", "--to", "copy"], 2),
    ],
)
def test_a_stopped_run_is_said_to_be_stopped(
    folder: RunFolder, words: list[str], code: int
) -> None:
    place = str(folder.path)
    verb = words.index("pull") + 1 if "pull" in words else len(words)

    answer = ask(*words[:verb], place, *words[verb:])

    said = " ".join((answer.output + str(answer.exception or "")).split())
    assert f"not running: stopped since {SINCE} at batch 47 of" in said
    assert f"`nyala up {place}`" in said
    assert "Redis" not in said
    assert answer.exit_code == code


def test_of_a_run_whose_store_is_elsewhere_nobody_here_knows_whether_it_is_stopped(
    folder: RunFolder,
) -> None:
    folder.redis.rmdir()

    for words in (["stop"], ["buffer", "stats"]):
        answer = ask(*words, str(folder.path))
        assert "stopped since" not in answer.output + str(answer.exception or "")
    assert not headline(read_run(folder.path)).startswith("Stopped")


def test_programs_get_the_moment(folder: RunFolder) -> None:
    found = json.loads(ask("status", "--json", str(folder.path)).stdout)

    assert (found["is_up"], found["store"], found["stopped_at"]) == (False, None, STOPPED_AT)
    with folder.locked():
        found = json.loads(ask("status", "--json", str(folder.path)).stdout)
    assert found["stopped_at"] is None


def test_report_doctor_and_python_say_so_too(folder: RunFolder) -> None:
    assert headline(read_run(folder.path)).startswith("Stopped after 47 of ")
    assert f"; `nyala up {folder.path}` goes on; held-out" in headline(read_run(folder.path))
    checks = settings_checks(tiny_settings(folder.path.parent), folder.path)
    (state,) = [check for check in checks if (check.group, check.name) == ("run", "state")]
    assert f"stopped since {SINCE} at batch 47" in str(state.look())
    assert Run(folder.path).state == "unfinished"


def test_a_run_without_a_batch_and_one_that_is_kept_up(folder: RunFolder) -> None:
    folder.metrics.unlink()
    folder.evaluations.unlink()

    assert f"stopped since {SINCE} before its first batch; to go on from its beginning" in " ".join(
        ask("status", str(folder.path)).output.split()
    )
    with folder.locked():
        assert "stopped since" not in ask("status", str(folder.path)).output
        assert "stopped since" not in str(ask("buffer", "stats", str(folder.path)).exception)
