"""The folder of a run: state, settings, lock, archive."""

import itertools
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.loader import load, save
from configs.settings import AlgorithmSettings, RunSettings, Settings
from configs.tables.run import SampleSettings, TracingSettings
from console.run.plan import given_redis, prepare, role_command
from console.run.run_folder import RunFolder, RunState, refuse_changes, run_folder_of, settings_of
from console.run.user_files import resolve, resolve_as_begun


def settings_in(folder, **run):
    return Settings(run=RunSettings(model="init", name="r", directory=folder, **run))


def changed(settings, table, **keys):
    return settings.model_copy(update={table: getattr(settings, table).model_copy(update=keys)})


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "r")


def test_a_run_is_new_then_unfinished_then_finished(folder, tmp_path):
    assert folder.state is RunState.NEW

    save(settings_in(tmp_path), folder.config)
    assert folder.state is RunState.UNFINISHED

    folder.summary.write_text("{}")
    assert folder.state is RunState.FINISHED


def test_the_newest_checkpoint_is_the_last_complete_one(folder):
    assert folder.newest_checkpoint() is None
    for name in ("step-000050", "step-000100", "step-000100-backup", ".step-000150.tmp"):
        (folder.checkpoints / name).mkdir(parents=True)

    assert folder.newest_checkpoint() == "step-000100"
    for name in ("step-999950", "step-1000000"):
        (folder.checkpoints / name).mkdir()
    assert folder.newest_checkpoint() == "step-1000000"


def test_archives_never_meet(folder):
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    names = []
    for _ in range(3):
        folder.path.mkdir()
        names.append(folder.archive(now).name)

    assert names == ["r.20260102T030405Z", "r.20260102T030405Z-2", "r.20260102T030405Z-3"]


@pytest.mark.slow
def test_a_second_up_of_the_same_run_is_refused(folder):
    program = (
        "import sys, pathlib\n"
        "from console.run.run_folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked(): print('in')"
    )
    command = [sys.executable, "-c", program, str(folder.path)]

    with folder.locked():
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    allowed = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "must be started once at a time" in refused.stderr
    assert allowed.stdout == "in\n"


def test_a_changed_setting_is_refused_by_name_and_a_harmless_one_is_not(folder, tmp_path):
    begun = settings_in(tmp_path)
    save(begun, folder.config)

    refuse_changes(folder, begun)
    refuse_changes(folder, changed(begun, "actors", count=5))
    refuse_changes(folder, changed(begun, "console", max_restarts=1))
    refuse_changes(folder, changed(begun, "run", samples=SampleSettings(every=3)))
    refuse_changes(folder, changed(begun, "run", tracing=TracingSettings(share=0.5)))
    refuse_changes(folder, changed(begun, "broker", endpoint="tcp://127.0.0.1:1"))
    with pytest.raises(SettingsError, match=r"(?s)got 2 changed.*\$\.run\.steps was 100, got 7"):
        refuse_changes(folder, changed(changed(begun, "run", steps=7), "learner", lr=1.0))


def test_prepared_files_are_all_that_processes_need_and_have_no_password(folder, tmp_path):
    settings = changed(settings_in(tmp_path), "broker", endpoint="tcp://127.0.0.1:0")
    settings = changed(settings, "buffer", url="redis://:secret@127.0.0.1:1/0")

    server = prepare(settings, folder, redis_url=settings.buffer.url)

    written = settings_of(folder.path)
    assert server is None
    assert not written.broker.endpoint.endswith(":0")
    assert written.buffer.url is None
    assert "secret" not in folder.config.read_text()
    assert folder.redis_url.read_text() == "redis://:secret@127.0.0.1:1/0\n"
    assert (folder.keys / "broker.key").exists()


def test_the_port_is_kept_over_a_restart(folder, tmp_path):
    settings = changed(settings_in(tmp_path), "broker", endpoint="tcp://127.0.0.1:0")

    prepare(settings, folder, redis_url="redis://x")
    first = settings_of(folder.path).broker.endpoint
    prepare(settings, folder, redis_url="redis://x")

    assert settings_of(folder.path).broker.endpoint == first


def test_a_redis_that_was_given_once_is_used_again(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("NYALA_REDIS_URL", raising=False)
    settings = settings_in(tmp_path)
    assert given_redis(settings.buffer, folder) is None

    prepare(settings, folder, redis_url="redis://given")
    assert given_redis(settings.buffer, folder) == "redis://given"
    monkeypatch.setenv("NYALA_REDIS_URL", "redis://environment")
    assert given_redis(settings.buffer, folder) == "redis://environment"
    monkeypatch.delenv("NYALA_REDIS_URL")
    (tmp_path / "secret").write_text("redis://mounted\n")
    monkeypatch.setenv("NYALA_REDIS_URL_FILE", str(tmp_path / "secret"))
    assert given_redis(settings.buffer, folder) == "redis://mounted"


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    losses = AlgorithmSettings(surrogate="loss.py:f", correction="module:f", advantage="package/f")
    settings = Settings(run=RunSettings(model="model", reward="score.py:f"), algorithm=losses)

    resolved = resolve(settings)

    run, algorithm = resolved.run, resolved.algorithm
    assert algorithm == losses.model_copy(update={"surrogate": f"{tmp_path}/loss.py:f"})
    assert run.directory == tmp_path / "runs"
    assert run.model == str(tmp_path / "model")
    assert run.reward == f"{tmp_path}/score.py:f"


def test_an_unfinished_run_keeps_its_files_wherever_it_is_resumed(folder, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "here").mkdir()
    given = {"path": "../data/sums.jsonl", "factory": "shop.py:Shop"}
    both = [{"environment": "dataset", "environment_settings": given, "reward": ["score.py:f"]}]
    alone = {"environment": "env.py:Env", "environment_settings": {"path": "sums.jsonl"}}

    for run in ({"environments": both}, alone | {"reward": "score.py:f"}, both[0]):
        typed = Settings(
            run=RunSettings(model="init", directory=tmp_path, **run),
            algorithm=AlgorithmSettings(correction="loss.py:f"),
        )
        monkeypatch.chdir(tmp_path / "here")
        save(resolve(typed), folder.config)
        begun = load(folder.config)
        monkeypatch.chdir("/")
        refuse_changes(folder, resolve_as_begun(typed, begun))
        other = typed.run.model_copy(update={"reward": "other.py:f", "environments": ()})
        changed = resolve_as_begun(typed.model_copy(update={"run": other}), begun)
        with pytest.raises(SettingsError, match="must keep the settings"):
            refuse_changes(folder, changed)


def test_a_run_whose_parent_was_moved_still_finds_itself(folder, tmp_path):
    save(settings_in(tmp_path), folder.config)
    (tmp_path / "else where").mkdir()
    moved = folder.path.rename(tmp_path / "else where" / "r")

    settings = settings_of(moved)
    command = role_command("actor", "actors", moved, ["actors.threads=2"], settings)

    assert settings.run.folder == moved
    overrides = [
        value for flag, value in itertools.pairwise(map(str, command.arguments)) if flag == "--set"
    ]
    assert load(moved / "config.yaml", overrides).run.folder == moved


def test_a_renamed_run_is_refused_because_redis_knows_its_old_name(folder, tmp_path):
    save(settings_in(tmp_path), folder.config)
    renamed = folder.path.rename(tmp_path / "s")

    with pytest.raises(SettingsError, match="must have the name of its run, r"):
        settings_of(renamed)


def test_a_run_is_found_from_inside_its_folder(folder, tmp_path, monkeypatch):
    save(settings_in(tmp_path), folder.config)
    monkeypatch.chdir(folder.path)

    assert run_folder_of(Path()).path == folder.path


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="must be the folder of a run such as runs/demo"):
        run_folder_of(tmp_path)
