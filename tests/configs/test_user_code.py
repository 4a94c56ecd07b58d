"""Code of the user is found by file or module, hashed, and hides nothing of ours."""

from __future__ import annotations

import sys

import pytest

from configs.errors import SettingsError
from configs.hashes import run_hashes, settings_hash
from configs.settings import RunSettings
from configs.user_code import explain, load_user_code


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def load(name, kind="class"):
    return load_user_code(str(name), setting="run.environment", kind=kind)


def test_a_file_is_loaded_with_what_lies_beside_it_and_hides_nothing_of_ours(tmp_path):
    (tmp_path / "beside_it.py").write_text("A = 7\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("from beside_it import A\nclass Env: a = A\n")

    assert load(f"{tmp_path}/mine.py:Env").a == 7
    assert sys.path[-1] == str(tmp_path)


def test_a_module_of_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "module_of_mine.py").write_text("class Env: a = 8\n")
    monkeypatch.chdir(tmp_path)

    assert load("module_of_mine:Env").a == 8
    assert run_hashes(RunSettings(model="init", environment="module_of_mine:Env"))


def test_the_hash_of_an_environment_follows_its_file_and_not_its_folder(tmp_path):
    runs = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text("class Env: ...\n")
        name = f"{tmp_path}/{folder}/env.py:Env"
        runs.append(RunSettings(model="init", environment=name))

    here, there = map(run_hashes, runs)
    assert here == there
    assert settings_hash(runs[0]) == settings_hash(runs[1])

    (tmp_path / "b" / "env.py").write_text("class Env: changed = True\n")
    assert run_hashes(runs[1])["environment"] != here["environment"]
    with pytest.raises(SettingsError, match=r"run.environment must be a readable file, got 'no/"):
        run_hashes(RunSettings(model="init", environment="no/such.py:Env"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class Other: ...", r"a class of .*/mine.py, .*it has Other"),
        ("import os\nEnv = 1 / 0", r"ZeroDivisionError.* at .*/mine.py:2: `Env = 1 / 0`"),
        ("raise SystemExit(3)", r"can be imported, .*SystemExit: 3, at .*/mine.py:1"),
        ("def f(:", r"can be imported, .*SyntaxError.*mine.py, line 1"),
        ("from configs.mine import a", r"rename its configs/: Nyala has a package of that name"),
    ],
)
def test_a_file_that_fails_is_refused_with_the_line(tmp_path, source, words):
    (tmp_path / "configs").mkdir()
    (tmp_path / "mine.py").write_text(source)

    with pytest.raises(SettingsError, match=f"run.environment must be .*{words}"):
        load(f"{tmp_path}/mine.py:Env")


def test_a_folder_of_our_name_is_blamed_for_imports_alone(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "mine.py").write_text("1 / 0\n")

    with pytest.raises(SettingsError, match="ZeroDivisionError") as refusal:
        load(f"{tmp_path}/mine.py:f")

    assert "rename" not in str(refusal.value)


def test_an_error_outside_of_user_code_is_explained_without_a_line():
    with pytest.raises(SettingsError) as refused:
        load("json.no_such_module:Env")

    assert "No module named 'json.no_such_module'; a file is named by its path" in str(
        refused.value
    )
    assert explain(ValueError("x")) == "ValueError: x"
