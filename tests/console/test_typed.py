"""Hints repeat the command as it was typed, and what cannot be written is one sentence."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console import command_line
from console.command_line import VERBS
from console.main import app
from console.run import run_folder
from console.verbs.up import Launch


def test_hints_name_the_program_as_it_was_typed(monkeypatch):
    text = "end it, or: nyala status runs/x; `nyala up` began nyala"
    monkeypatch.setattr(sys, "argv", ["python -c"])
    assert command_line.as_typed(text) == text

    monkeypatch.setattr(sys, "argv", ["../checkout/.venv/bin/nyala"])
    assert command_line.program() == "../checkout/.venv/bin/nyala"

    monkeypatch.setenv(command_line.VARIABLE, "../checkout/run")
    assert command_line.as_typed(text) == (
        "end it, or: ../checkout/run status runs/x; `../checkout/run up` began nyala"
    )


def test_hints_of_every_verb_can_be_pasted(monkeypatch):
    monkeypatch.setenv(command_line.VARIABLE, "./run")

    for verb in VERBS:
        assert command_line.as_typed(f"try `nyala {verb}`") == f"try `./run {verb}`"
    assert command_line.as_typed("nyala trains") == "nyala trains"


def test_nyala_on_the_path_is_called_so(monkeypatch, tmp_path):
    program = tmp_path / "nyala"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert command_line.program() == str(program)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line.program() == "nyala"


def test_a_launch_repeats_its_flags_but_what_holds_once(monkeypatch):
    monkeypatch.setenv(command_line.VARIABLE, "./run")
    launch = Launch(
        Path("my runs/a.yaml"),
        ["run.steps=3"],
        method="GSPO",
        trust_checkpoint="step-000050",  # trusted once
        fresh=True,
        plain=True,
    )

    assert launch.command == ("./run up 'my runs/a.yaml' --set run.steps=3 --method GSPO --plain")
    assert launch.changes[-1] == "run.steps=3"
    assert len(launch.changes) > 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "let your user read and write it"),
        (errno.EEXIST, "move the file"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(monkeypatch, tmp_path, number, advice):
    def refuse(*_, **__):
        raise OSError(number, "no", "/runs/x")

    monkeypatch.setattr(run_folder.RunFolder, "locked", refuse)
    (tmp_path / "a.yaml").write_text(f"run: {{model: init, directory: {tmp_path}}}")

    answer = CliRunner().invoke(app, ["up", str(tmp_path / "a.yaml")])

    assert answer.exit_code == 2
    assert answer.stderr.startswith(
        f"nyala: /runs/x must be readable and writable, got: no; {advice}"
    )
    assert answer.stderr.count("\n") == 1


def test_a_file_where_runs_are_to_be_kept_is_one_sentence(tmp_path):
    (tmp_path / "a.yaml").write_text(f"run: {{model: init, directory: {tmp_path}/a.yaml/runs}}")

    answer = CliRunner().invoke(app, ["up", str(tmp_path / "a.yaml")])

    assert answer.stderr.startswith("nyala: ")
    assert "a.yaml/runs must be readable and writable, got: Not a directory" in answer.stderr
