"""Conversations that the supervised start of a model for live agents imitates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.__main__ import export
from configs.errors import SettingsError
from configs.hashes import run_hashes, settings_hash
from configs.settings import RunSettings, Settings
from console.run.init_model import stamp

SHOWN = """
def chat(task, memory):
    said = [{"role": "user", "content": task}, {"role": "assistant", "content": memory["a"]}]
    return {"messages": said, "tools": [{"function": {"name": "get"}}]}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunSettings:
    rows = [{"task": f"tell {n}", "memory": {"a": str(n)}} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "shown.py").write_text(SHOWN)
    return RunSettings(
        model="init",
        environment="agent",
        environment_settings={
            "path": str(tmp_path / "rows.jsonl"),
            "prompt": "task",
            "demonstration": f"{tmp_path}/shown.py:chat",
        },
    )


def without_demonstration(run: RunSettings) -> RunSettings:
    settings = {k: v for k, v in run.environment_settings.items() if k != "demonstration"}
    return run.model_copy(update={"environment_settings": settings})


def lines_of(run: RunSettings, out: Path, **more: bool) -> list[dict[str, list[dict[str, str]]]]:
    export(run, out, count=5, seed=1, **more)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_become_the_chats_of_the_function(run, tmp_path):
    for line in lines_of(run, tmp_path / "out"):
        asked, said = line["messages"]
        assert asked == {"role": "user", "content": f"tell {said['content']}"}
        assert line["tools"] == [{"function": {"name": "get"}}]


def test_without_a_function_there_is_no_supervised_start_but_a_model(run, tmp_path):
    run = without_demonstration(run)

    with pytest.raises(SettingsError, match=r"for live agents by environment_settings\.demonstr"):
        lines_of(run, tmp_path / "out")
    for line in lines_of(run, tmp_path / "out", needs_answers=False):
        assert [message["role"] for message in line["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def chat(task): ...", "without an error, got TypeError"),
        ("def chat(**row): return [1]", r"must return {'messages': .*, got \[1\]"),
        ("def chat(**row): return {'messages': ['hello']}", "must return {'messages'"),
    ],
)
def test_a_function_that_shows_no_chat_is_refused(run, tmp_path, code, reason):
    (tmp_path / "shown.py").write_text(code)

    with pytest.raises(SettingsError, match=reason):
        lines_of(run, tmp_path / "out")


def test_another_function_makes_another_model_but_its_folder_makes_no_other_run(run, tmp_path):
    settings = Settings(run=run)
    before, shared = stamp(settings), settings_hash(run)
    code = tmp_path / "shown.py"
    moved = tmp_path / "elsewhere" / "shown.py"
    moved.parent.mkdir()
    moved.write_text(code.read_text())
    named = run.environment_settings | {"demonstration": f"{moved}:chat"}

    assert settings_hash(run.model_copy(update={"environment_settings": named})) == shared
    assert run_hashes(run.model_copy(update={"environment_settings": named})) == run_hashes(run)

    code.write_text(code.read_text() + "\n# changed\n")
    assert stamp(settings) != before
