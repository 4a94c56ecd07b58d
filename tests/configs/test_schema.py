"""The exported JSON schema, the presets and the hints stay true to the settings."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from configs.error_text import ALIASES, owner_of
from configs.loader import json_schema, load
from configs.settings import Settings

FOLDER = Path(__file__).parents[2] / "configs"
MOST_SETTINGS = 245  # 159 when this was written; peers have up to 446
PRESETS = sorted(FOLDER.glob("*.yaml"))


def fields():
    for table, field in Settings.model_fields.items():
        assert field.annotation is not None
        for key, inner in field.annotation.model_fields.items():
            yield f"{table}.{key}", inner


def own_names():
    return {name for name, _ in fields()}


def test_the_committed_schema_is_the_one_that_nyala_schema_writes():
    assert (FOLDER / "settings.schema.json").read_text() == json_schema()


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_and_satisfies_the_schema(preset):
    tree = yaml.safe_load(preset.read_text())

    settings = load(preset)

    jsonschema.validate(settings.model_dump(mode="json"), json.loads(json_schema()))
    assert tree["run"]["name"] == settings.run.name == preset.stem


def test_there_is_a_preset_for_each_kind_of_machine():
    names = {path.stem for path in PRESETS}

    assert names >= {"demo", "sorting", "calculator", "tiny", "qwen3-0.6b", "multi-gpu", "smollm2"}


def test_settings_stay_few_enough_to_read():
    assert len(list(fields())) <= MOST_SETTINGS


def test_every_setting_says_what_it_is_for():
    without = {name for name, field in fields() if not field.description}

    assert without <= {"learner.adam_beta1", "learner.adam_beta2"}


def test_hints_lead_to_settings_that_exist_and_no_name_leads_to_two():
    aliases = [alias for names in ALIASES.values() for alias in names.split()]

    assert set(ALIASES) <= own_names()
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & own_names()


def test_the_longest_known_tail_of_a_path_decides():
    assert owner_of("trainer.policy.optimizer_config.lr") is None
    assert owner_of("a.b.optim.lr") == "learner.lr"
    assert owner_of("--eps-clip") == "algorithm.clip_low"
