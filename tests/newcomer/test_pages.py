"""The blocks of README and docs/, copied into an empty folder, pass every check."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.main import app
from tests.newcomer.journeys import JOURNEYS, TOOLS, Journey, flags
from tests.newcomer.pages import PAGES, blocks_of, write_project


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_python_can_be_compiled(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, page, "exec")


def test_blocks_are_found_with_their_files() -> None:
    found = {(block.language, block.file) for page in PAGES for block in blocks_of(page)}

    assert {
        ("yaml", "mine.yaml"),
        ("json", "questions.jsonl"),
        ("python", "rewards.py"),
        ("python", "env.py"),
        ("json", "budgets.jsonl"),
        ("python", "shop.py"),
    } <= found


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda each: each.name)
def test_what_the_pages_say_passes_every_check(
    journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, journey.pages)

    done = CliRunner().invoke(app, ["up", "mine.yaml", "--dry-run", *flags(journey)])

    assert done.exit_code == 0, done.output
    assert "would start in" in done.output


def test_the_class_with_tools_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, TOOLS.pages)

    done = CliRunner().invoke(
        app, ["env", "test", "mine.yaml", "--policy", "echo", "-n", "2", *flags(TOOLS)]
    )

    assert done.exit_code == 0, done.output
    assert "You have 7." in done.output
    assert "You have 3." in done.output
