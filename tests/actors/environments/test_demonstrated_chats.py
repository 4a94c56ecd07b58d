"""Conversations that the supervised start of a model for live agents imitates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.demonstrations import DemonstratedChat, export, shown_items
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


def chats_of(run: RunSettings, *, needs_answers: bool = True) -> list[DemonstratedChat]:
    shown = shown_items(run, range(5), seed=1, is_held_out=False, needs_answers=needs_answers)
    return [chat for chat in shown if isinstance(chat, DemonstratedChat)]


def test_rows_become_the_chats_of_the_function(run):
    assert len(chats_of(run)) == 5
    for chat in chats_of(run):
        asked, said = chat.messages
        assert asked == {"role": "user", "content": f"tell {said['content']}"}
        assert chat.tools == [{"function": {"name": "get"}}]


def test_without_a_function_there_is_no_supervised_start_but_a_model(run):
    run = without_demonstration(run)

    with pytest.raises(SettingsError, match=r"for live agents by environment_settings\.demonstr"):
        chats_of(run)
    for chat in chats_of(run, needs_answers=False):
        assert [message["role"] for message in chat.messages] == ["user"]


def test_chats_are_exported_with_the_names_of_their_tools(run, tmp_path):
    settings = Settings.model_validate({"run": run, "learner": {"warm_start_steps": 1}})

    counts = export(settings, tmp_path / "out", count=5, makes_tokenizer=True)

    assert counts.rows == 5


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
        chats_of(run)


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
