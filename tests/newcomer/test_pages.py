"""The blocks of README and docs/, copied into an empty folder, pass every check."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.main import app
from tests.newcomer.journeys import AGENT, JOURNEYS, TOOLS, Journey, flags
from tests.newcomer.pages import PAGES, ROOT, blocks_of, write_project


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


def test_the_agent_that_a_page_shows_is_the_one_of_the_preset() -> None:
    (shown,) = (block.text for block in blocks_of("docs/agents.md") if block.file == "swap.py")

    assert shown == "# swap.py\n" + (ROOT / "configs/agent/swap.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/agents.md"])
def test_an_agent_of_ones_own_passes_every_check(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, AGENT.pages)
    (tmp_path / "my_agent.yaml").unlink()
    write_project(tmp_path, [page])  # appends to the other files

    done = CliRunner().invoke(app, ["up", "my_agent.yaml", "--dry-run", *flags(AGENT)])

    assert done.exit_code == 0, done.output
    assert "agents: 1 thread(s)" in done.output


def test_the_class_with_tools_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, TOOLS.pages)

    done = CliRunner().invoke(
        app, ["env", "test", "mine.yaml", "--policy", "echo", "-n", "2", *flags(TOOLS)]
    )

    assert done.exit_code == 0, done.output
    assert "You have 7." in done.output
    assert "You have 3." in done.output
