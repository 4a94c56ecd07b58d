"""`nyala up --trust-checkpoint`: done once, before anything starts, and remembered nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import SettingsError
from configs.settings import RunSettings
from console.verbs import up
from learner.checkpointing import resume


@pytest.fixture
def launch(tmp_path: Path) -> up.Launch:
    config = tmp_path / "r.yaml"
    config.write_text(f"run: {{name: r, directory: {tmp_path}, model: init}}")
    return up.Launch(config, trust_checkpoint="step-000005")


def test_it_is_done_before_the_session_and_is_no_part_of_what_the_session_is_given(
    launch: up.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    sessions: list[dict[str, Any]] = []

    class Session:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            sessions.append({"arguments": arguments, **options})

        def run(self) -> int:
            story.append("session")
            return 0

    def trusts(_run: RunSettings, name: str) -> None:
        story.append(name)

    monkeypatch.setattr(up, "check_start", lambda *_, **__: [])
    monkeypatch.setattr(up, "Session", Session)
    monkeypatch.setattr(resume, "trust_checkpoint", trusts)

    assert up.start(launch, Console()) == 0

    assert story == ["step-000005", "session"]
    assert sessions[0]["resume_command"] == f"nyala up {launch.config}"
    assert "step-000005" not in sessions[0]["arguments"][0].model_dump_json()


def test_a_fresh_run_has_no_checkpoint_to_trust(launch: up.Launch) -> None:
    with pytest.raises(SettingsError, match="must be given without --fresh"):
        up.start(replace(launch, fresh=True), Console())
