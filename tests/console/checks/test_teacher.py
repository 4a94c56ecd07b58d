"""Teachers that no run could learn from, found before the run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.errors import SettingsError
from configs.settings import Settings
from console.run.checks.loss import check_teacher
from console.run.checks.model import learner_memory
from console.run.preflight import checks_of_start
from tests.actors.support.saved_tokenizer import save_tokenizer
from tests.learner.support.tiny_policy import save_tiny_model


def settings_of(folder: Path, *, run: dict[str, Any] | None = None, **algorithm: Any) -> Settings:
    save_tiny_model(folder / "model")
    given = {"model": str(folder / "model"), "environment": "calculator", "directory": str(folder)}
    lengths = {"max_prompt_tokens": 16, "max_completion_tokens": 16}
    return Settings.model_validate({"run": given | lengths | (run or {}), "algorithm": algorithm})


def teacher_of(folder: Path, *, width: int = 32) -> str:
    save_tiny_model(folder / "teacher", seed=1, width=width)
    return str(folder / "teacher")


def test_a_teacher_of_the_same_family_passes(tmp_path: Path) -> None:
    teacher = teacher_of(tmp_path)

    found = check_teacher(settings_of(tmp_path, teacher=teacher))

    assert found.startswith(f"{teacher}: ") and found.endswith("tokens, as run.model has them")


def test_another_tokenizer_is_refused_before_the_start(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, teacher=save_tokenizer(teacher_of(tmp_path)))

    (check,) = (check for check in checks_of_start(settings, None) if check.name == "teacher")

    with pytest.raises(
        SettingsError, match=r"tokenizer of run\.model, .*, whose token 0 is 'a', no"
    ):
        check.look()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_teacher_that_is_not_there_is_refused_by_its_own_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    settings = settings_of(tmp_path, teacher={"calculator": str(tmp_path / name)})

    with pytest.raises(
        SettingsError, match=r"^algorithm\.teacher must be a Hugging Face model dir"
    ):
        check_teacher(settings)


def test_a_character_model_is_compared_once_it_is_made(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, run={"model": "init"}, teacher=teacher_of(tmp_path))

    assert check_teacher(settings) == "compared with the character model once that is made"


def test_a_prompt_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, teacher_prompt="missing.py:hint")

    with pytest.raises(SettingsError, match=r"algorithm\.teacher_prompt must be an existing file"):
        check_teacher(settings)


def test_a_run_without_a_teacher_is_not_asked_for_one(tmp_path: Path) -> None:
    names = [check.name for check in checks_of_start(settings_of(tmp_path), None)]

    assert "teacher" not in names


def test_the_memory_of_teachers_is_that_of_their_own_sizes(tmp_path: Path) -> None:
    wide = teacher_of(tmp_path, width=64)

    def weights(**algorithm: Any) -> int:
        memory = learner_memory(settings_of(tmp_path, **algorithm), None)
        assert not isinstance(memory, str)
        return memory[0].states.get("weights of the teachers", 0)

    own = weights(teacher_prompt="hint")
    assert weights() == 0 < own < weights(teacher=wide)
    assert weights(teacher={"calculator": wide}) == weights(teacher=wide)


def test_with_adapters_the_initial_model_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, teacher_prompt="hint")
    learner = settings.learner.model_copy(update={"lora_rank": 4})

    memory = learner_memory(settings.model_copy(update={"learner": learner}), None)

    assert not isinstance(memory, str)
    assert "weights of the teachers" not in memory[0].states
