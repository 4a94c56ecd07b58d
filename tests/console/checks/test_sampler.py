"""The sampler of a run is tried, and its prompts compared with the rows of a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import SettingsError
from configs.settings import RunSettings, Settings
from console.run.checks.reward import check_sampler
from console.run.preflight import checks_of_start

ROWS = 40


def run_of(folder: Path, **changes: Any) -> RunSettings:
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(ROWS)]
    for name in ("rows", "held_out"):
        text = "".join(json.dumps(row) + "\n" for row in rows[: ROWS if name == "rows" else 4])
        (folder / f"{name}.jsonl").write_text(text)
    own = {
        "path": str(folder / "rows.jsonl"),
        "held_out": str(folder / "held_out.jsonl"),
        "prompt": "question",
        "answer": "answer",
    }
    made = {"environment": "dataset", "environment_settings": own, "sampler": "difficulty"}
    return RunSettings(model="init", **(made | changes))


def test_a_sampler_may_have_as_many_prompts_as_there_are_training_rows(tmp_path: Path) -> None:
    assert check_sampler(run_of(tmp_path, sampler_prompts=ROWS - 4)) == "difficulty chooses"

    with pytest.raises(
        SettingsError,
        match=rf"must be at most the training rows of dataset = {ROWS - 4}, got {ROWS}; a row",
    ):
        check_sampler(run_of(tmp_path, sampler_prompts=ROWS))


def test_a_generator_has_as_many_prompts_as_are_set(tmp_path: Path) -> None:
    run = run_of(tmp_path, environment="calculator", environment_settings={}, sampler_prompts=10**6)

    assert check_sampler(run) == "difficulty chooses"


def test_a_sampler_that_is_not_repeatable_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\n\ndef choose(seed, group, pool):\n    return os.urandom(1)[0]\n")
    run = run_of(tmp_path, sampler=f"{file}:choose", sampler_prompts=256)
    settings = Settings.model_validate({"run": run.model_dump()})
    (check,) = (check for check in checks_of_start(settings, None) if check.name == "sampler")

    with pytest.raises(SettingsError, match="must return the same prompt for the same arguments"):
        check.look()


def test_a_uniform_run_has_no_such_check(tmp_path: Path) -> None:
    settings = Settings.model_validate({"run": {"model": "init"}})

    assert "sampler" not in {check.name for check in checks_of_start(settings, None)}
