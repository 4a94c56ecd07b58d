"""Prompts that are too long for a run: found in all rows, within a bounded time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.environments.registry import make_dataset
from configs.errors import DeadlineError, SettingsError
from configs.settings import RunSettings, Settings
from console.doctor.implied import settings_checks
from console.run.checks import reward
from console.run.checks.check import CheckWarning
from console.run.checks.reward import check_prompts, prompt_lengths
from console.run.preflight import check_start, refuse_what_cannot_run

ROWS = 300
LIMIT = 64
LONG = "x" * LIMIT  # and the sentence about the form of the answer

OWN = """
class Item:
    answer, demonstration = "1", ()
    def __init__(self, index): self.prompt = "?" * (index + 1)
    def step(self, text): raise NotImplementedError
    def score(self): raise NotImplementedError

class Growing:
    def begin(self, index, seed, *, held_out): return Item(index)
    def describe(self): return "it grows"
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Rows of which the last one is too long."""
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(ROWS)]
    rows[-1]["prompt"] = LONG
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"path": str(path), "answer": "answer", "answer_format": ""}
    return settings_of(tmp_path, environment="dataset", environment_settings=own)


def settings_of(folder: Path, **run: object) -> Settings:
    return Settings(
        run=RunSettings(
            model="init",
            directory=folder,
            max_prompt_tokens=LIMIT - 1,
            **run,
        )
    )


REFUSAL = (
    rf"run\.max_prompt_tokens must be enough for the prompts of dataset, got {LIMIT - 1} for 1 of "
    rf"{ROWS} prompts, of up to {LIMIT} tokens \('x+'\); raise it to {LIMIT}, or shorten"
)


def test_one_row_of_hundreds_is_found_by_up_and_doctor(settings, tmp_path) -> None:
    with pytest.raises(SettingsError, match=REFUSAL):
        check_prompts(settings, has_begun=False)
    with pytest.raises(SettingsError, match=REFUSAL):
        refuse_what_cannot_run(settings, redis_url=None)
    (check,) = [c for c in settings_checks(settings, tmp_path) if c.name == "prompts"]
    with pytest.raises(SettingsError, match=REFUSAL):
        check.look()

    run = settings.run.model_copy(update={"max_prompt_tokens": LIMIT})
    said = check_prompts(settings.model_copy(update={"run": run}), has_begun=False)
    assert said == f"dataset: 3 to {LIMIT} tokens in {ROWS} prompts"


def test_a_run_that_has_begun_is_told_what_would_be_accepted(settings, tmp_path) -> None:
    doubts = check_start(settings, redis_url=None, forks=None, has_begun=True)

    (doubt,) = [each for each in doubts if "run.max_prompt_tokens" in each]
    assert doubt.endswith("; as this run keeps its settings, begin it anew with --fresh")
    settings.run.folder.mkdir()
    (settings.run.folder / "config.yaml").write_text("")
    (check,) = [c for c in settings_checks(settings, tmp_path) if c.name == "prompts"]
    assert isinstance(check.look(), CheckWarning)


def test_the_longest_are_counted_first_and_a_part_is_called_one(settings, monkeypatch) -> None:
    dataset, counted = make_dataset(settings.run), []

    def count(prompt, _tools) -> int:
        counted.append(prompt)
        return len(prompt)

    part = prompt_lengths(dataset, count, seconds=0.0)

    assert counted == ["0+1"]  # reading took all the time that there was
    assert part.looked_at == f"1 of {ROWS} prompts, from the first rows"
    assert not part.is_whole
    monkeypatch.setattr(reward, "MOST_PROMPTS", 7)
    assert prompt_lengths(dataset, count).tokens == [LIMIT, *[5] * 6]
    small = settings.run.model_copy(update={"max_prompt_tokens": LIMIT})
    fits = settings.model_copy(update={"run": small})
    assert f"tokens in the 7 longest of {ROWS} prompts" in str(check_prompts(fits, has_begun=False))
    monkeypatch.setattr(reward, "prompt_lengths", lambda *_: part)
    doubt = check_prompts(fits, has_begun=False)
    assert isinstance(doubt, CheckWarning)
    assert f"should be counted, got 1 of {ROWS} prompts, from the first rows in 20" in doubt.text


def test_rows_that_take_too_long_to_read_are_a_doubt_and_no_refusal(settings, monkeypatch) -> None:
    def late(*_: object) -> None:
        raise DeadlineError("it took 60 s")

    monkeypatch.setattr(reward, "for_each", lambda *_, **__: late())

    doubt = check_prompts(settings, has_begun=False)

    assert isinstance(doubt, CheckWarning)
    assert doubt.text == "it took 60 s; no prompt was counted: `nyala data check` has more time"


def test_items_of_another_environment_are_looked_at_beyond_the_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reward, "MOST_ITEMS", LIMIT)
    (tmp_path / "own.py").write_text(OWN)
    own = settings_of(tmp_path, environment=f"{tmp_path}/own.py:Growing", eval_episodes=0)

    with pytest.raises(
        SettingsError, match=rf"for 1 of the first {LIMIT} prompts, of up to {LIMIT}"
    ):
        check_prompts(own, has_begun=False)
