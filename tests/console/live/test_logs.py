"""`nyala logs`: lines of several processes, in the order of time, while they are written."""

import json

import pytest
from typer.testing import CliRunner

from configs.loader import save
from configs.settings import RunSettings, Settings
from console.live.logs import FIRST_READ_BYTES, Log, merged
from console.main import app


def line(second, event, **fields):
    stamp = f"2026-01-02T03:04:{second:02d}.5Z"
    return json.dumps({"event": event, "timestamp": stamp, "level": "info", **fields}) + "\n"


@pytest.fixture
def folder(tmp_path):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    save(settings, settings.run.folder / "config.yaml")
    logs = settings.run.folder / "logs"
    logs.mkdir()
    (logs / "learner.log").write_text(line(1, "starting") + "a trace\n" + line(5, "batch", step=3))
    actor = line(3, "bad \x1b[2J", level="warning", run="r", exception="first\nsecond\x07")
    (logs / "actor-0.log").write_text(actor)
    return settings.run.folder


def ask(folder, *arguments):
    return CliRunner().invoke(app, ["logs", str(folder), *arguments])


def test_lines_of_all_processes_are_merged_and_harmless(folder):
    assert ask(folder).stdout.splitlines() == [
        "03:04:01 learner: starting",
        "03:04:01 learner: a trace",
        "03:04:03 actor-0: WARNING bad \\x1b[2J",
        "first",
        "second\\x07",
        "03:04:05 learner: batch step=3",
    ]


def test_the_newest_lines_of_a_role_are_shown(folder):
    assert ask(folder, "learner", "-n", "1").stdout == "03:04:05 learner: batch step=3\n"
    assert ask(folder, "act", "-n", "1").stdout.startswith("03:04:03 actor-0: WARNING bad")
    assert ask(folder, "-n", "0").stdout == ""


def test_another_role_is_refused_with_those_there_are(folder):
    refused = ask(folder, "critic")

    assert refused.exit_code == 2
    assert "must be one that has a log, got critic; choose among actor-0, learner" in refused.stderr


def test_new_lines_are_read_once_and_whole(folder):
    path = folder / "logs" / "learner.log"
    log = Log(path)
    assert len(log.read_new()) == 3

    with path.open("a") as file:
        file.write(line(6, "six") + line(7, "seven")[:20])
    assert [each.text for each in log.read_new()] == ["six"]
    with path.open("a") as file:
        file.write(line(7, "seven")[20:])
    assert [each.text for each in log.read_new()] == ["seven"]
    assert log.read_new() == []
    path.write_text(line(8, "emptied"))  # it was full
    assert [each.text for each in merged([log])] == ["emptied"]


def test_of_a_long_log_the_newest_part_is_read(folder):
    path = folder / "logs" / "learner.log"
    path.write_text("x" * FIRST_READ_BYTES + "\n" + line(9, "last"))

    assert [each.text for each in Log(path).read_new()] == ["last"]
