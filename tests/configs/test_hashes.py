"""Hashes that the processes of one run compare when they meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.hashes import reward_hash, run_hashes, settings_hash
from configs.settings import RunSettings, Settings
from configs.tables.run import SampleSettings, TracingSettings


def hashes(**run):
    return run_hashes(RunSettings(model="init", **run))


def test_each_hash_follows_its_own_part_of_the_settings(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def f(output, prompt): return 1\n")
    base = hashes()

    assert base == hashes(directory=tmp_path)
    environment = hashes(environment_settings={"dataset": "gcd"})
    assert environment["environment"] != base["environment"]
    assert environment["reward"] == base["reward"]
    reward = hashes(reward=f"{path}:f")
    assert {name for name in base if base[name] != reward[name]} == {"reward"}


def test_the_settings_hash_tells_environments_apart_and_leaves_out_what_nobody_set():
    def of(**run):
        return settings_hash(RunSettings(model="init", **run))

    assert of(environment="calculator") != of(environment="reasoning_gym")
    assert of(environment="a/env.py:Env") == of(environment="/b/env.py:Env")
    assert of(system_prompt=None) == of()  # as in a run of a version without this setting
    assert of(system_prompt="be brief") != of()


def test_a_sampler_is_compared_by_its_name_and_not_by_its_folder():
    def of(**run):
        return settings_hash(RunSettings(model="init", **run))

    assert of(sampler="uniform") == of()  # as in a run of a version without this setting
    assert of(sampler="difficulty") != of()
    assert of(sampler="a/mine.py:choose") == of(sampler="/b/mine.py:choose")
    assert of(sampler="a/mine.py:choose") != of(sampler="a/mine.py:other")


def test_several_rewards_have_a_hash_of_their_own(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def f(): ...\ndef g(): ...\n")

    one, both, turned = (
        hashes(reward=reward)["reward"]
        for reward in (f"{path}:f", [f"{path}:f", f"{path}:g"], [f"{path}:g", f"{path}:f"])
    )

    assert one == hashes(reward=[f"{path}:f"])["reward"] == reward_hash(f"{path}:f")
    assert len({one, both, turned}) == 3


def test_reward_hash_follows_source_and_name(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def f(output, prompt): return 1\n")
    before = reward_hash(f"{path}:f")
    assert reward_hash(f"{path}:g") != before

    path.write_text("def f(output, prompt): return 2\n")

    assert reward_hash(f"{path}:f") != before
    assert reward_hash("configs.hashes:f") != before
    assert reward_hash(None) == "environment"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("no/such/file.py:f", "run.reward must be a readable file, got 'no/such/file.py:f'"),
        ("no.such.module:f", "run.reward must be in an importable module"),
    ],
)
def test_a_missing_reward_is_refused(reward, words):
    with pytest.raises(SettingsError, match=words):
        reward_hash(reward)


def test_the_hash_is_the_same_in_another_process():
    program = (
        "from configs.hashes import settings_hash\n"
        "from configs.settings import RunSettings\n"
        "print(settings_hash(RunSettings(model='m', environment_settings={EXTRA})))"
    )
    ours = settings_hash(RunSettings(model="m", environment_settings={"b": 1, "a": 2}))

    theirs = subprocess.run(
        [sys.executable, "-c", program.replace("EXTRA", "'a': 2, 'b': 1")],
        check=True,
        capture_output=True,
        text=True,
    )

    assert theirs.stdout.strip() == ours


def test_the_hash_speaks_for_what_roles_share_and_not_for_folders():
    base = Settings(run=RunSettings(model="m"))
    elsewhere = Settings(
        run=RunSettings(
            model="/other/m",
            directory=Path("/data"),
            samples=SampleSettings(every=3),
            tracing=TracingSettings(endpoint="http://127.0.0.1:4318"),
        )
    )
    hotter = Settings(run=RunSettings(model="m", temperature=0.7))
    more_actors = base.model_copy(update={"actors": base.actors.model_copy(update={"count": 9})})

    assert settings_hash(elsewhere.run) == settings_hash(base.run)
    assert settings_hash(more_actors.run) == settings_hash(base.run)
    assert settings_hash(hotter.run) != settings_hash(base.run)
