"""The command of agents: a program and files that are there."""

from __future__ import annotations

import sys

import pytest

from configs.errors import SettingsError
from configs.settings import AgentSettings, RunSettings
from console.run.checks.machine import agents_room_warning, check_agents


def test_a_command_that_can_be_started_is_named(tmp_path):
    (tmp_path / "agent.py").write_text("")
    agents = AgentSettings(command=(sys.executable, str(tmp_path / "agent.py"), "--fast"))

    assert check_agents(agents) == f"{sys.executable}, started once for each conversation"
    assert check_agents(AgentSettings()) == "started by hand: agents.command is null"


def test_a_program_that_is_not_installed_is_refused():
    with pytest.raises(SettingsError, match=r"must begin with a program .*, got 'no-such-agent'"):
        check_agents(AgentSettings(command="no-such-agent --fast"))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    agents = AgentSettings(command=(sys.executable, str(tmp_path / "agent.py")))

    with pytest.raises(SettingsError, match=r"must name files that are there, got '.*agent\.py'"):
        check_agents(agents)


def test_bounds_that_suit_single_questions_are_doubted_for_agents():
    rows = {"path": "rows.jsonl", "prompt": "task"}
    run = RunSettings(model="m", environment="agent", environment_settings=rows)
    both = agents_room_warning(run)
    one = agents_room_warning(run.model_copy(update={"max_prompt_tokens": 8192}))
    sets = {"max_prompt_tokens": 8192, "max_completion_tokens": 65536}

    assert both is not None
    assert "default of run.max_prompt_tokens = 1024 and run.max_completion_tokens = 1024" in both
    assert one is not None
    assert "default of run.max_completion_tokens = 1024:" in one
    assert agents_room_warning(run.model_copy(update=sets)) is None
    assert agents_room_warning(RunSettings(model="m")) is None
