"""Mistakes of a first hour: one sentence each, and what it asks for works."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from console.main import app
from tests.learner.support.tiny_policy import save_tiny_model
from tests.newcomer.mistakes import CHECK, MISTAKES, Changes, Mistake

LONGEST = 5  # lines: a sentence, or typer's own three with the usage


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NYALA_TYPED", raising=False)
    monkeypatch.chdir(tmp_path)
    assert type_in("nyala new mine").exit_code == 0
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def type_in(command: str) -> Result:
    program, *arguments = shlex.split(command)
    assert program == "nyala"
    return CliRunner().invoke(app, arguments)


def apply(changes: Changes, folder: Path, *, port: int, tiny_model: Path) -> None:
    for name, change in changes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if change == "{tiny_model}":
            for file in tiny_model.iterdir():
                (path / file.name).write_bytes(file.read_bytes())
        elif change == "{tiny_config}":
            path.write_bytes((tiny_model / "config.json").read_bytes())
        elif isinstance(change, str):
            path.write_text(change)
        else:
            old, new = (text.replace("{port}", str(port)) for text in change)
            text = path.read_text()
            assert text.count(old) == 1, f"{old!r} must stand once in {name}"
            path.write_text(text.replace(old, new))


PASSED: set[str] = set()


def state_of(project: Path, command: str) -> str:
    """Sum up a command and all files of a project."""
    files = sorted(path for path in project.rglob("*") if path.is_file())
    contents = [f"{path.relative_to(project)} {path.read_bytes()!r}" for path in files]
    return "\n".join([command, *contents])


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name.replace(" ", "-"))
def test_a_mistake_gets_one_sentence_and_its_remedy_works(
    mistake: Mistake, project: Path, port: int, tiny_model: Path
) -> None:
    apply(mistake.change, project, port=port, tiny_model=tiny_model)

    refused = type_in(mistake.command)

    assert refused.exit_code == 2, refused.output
    assert mistake.says in " ".join(re.sub(r"[│╭╮╰╯─]", " ", refused.output).split())
    assert "Traceback" not in refused.output
    assert refused.exception is None or isinstance(refused.exception, SystemExit)
    assert len(refused.output.strip().splitlines()) <= LONGEST, refused.output
    assert not list(project.glob("runs/*/config.yaml"))  # nothing was started

    apply(mistake.remedy, project, port=port, tiny_model=tiny_model)
    state = state_of(project, mistake.instead)
    if state in PASSED:  # many remedies lead back to the same project
        return
    done = type_in(mistake.instead)

    assert done.exit_code == 0, done.output
    PASSED.add(state)


@pytest.mark.parametrize(
    "mistake",
    [each for each in MISTAKES if each.command == CHECK],
    ids=lambda each: each.name.replace(" ", "-"),
)
def test_the_doctor_names_the_mistake_too(
    mistake: Mistake,
    project: Path,
    port: int,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("console.doctor.command.machine_checks", lambda *_, **__: [])
    apply(mistake.change, project, port=port, tiny_model=tiny_model)

    found = type_in("nyala doctor mine.yaml")

    assert found.exit_code == 1, found.output
    failed = [line for line in found.output.splitlines() if line.startswith("  failed")]
    assert mistake.says in " ".join(found.output.split())
    assert failed
    assert "Traceback" not in found.output
    assert not list(project.glob("runs/*"))


def test_there_are_forty_and_each_has_a_name_and_a_remedy() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 40
    for mistake in MISTAKES:
        assert mistake.remedy or mistake.instead != mistake.command
