"""`nyala top`: a run seen from another terminal, from its folder and its store."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buffer import operations
from buffer.store import Store
from configs.loader import save
from configs.settings import Settings
from console.display.progress import TAIL_BYTES, Progress, newest_stage, stopped_line
from console.display.snapshot import View, figures, wanted_actors
from console.live import top
from console.live.top import LocalRun
from console.main import app
from console.run.actor_watch import ActorWatch
from console.run.run_folder import RunFolder
from tests.console.support.recorded_run import FOLDER, rows
from tests.learner.support.tiny_run import begin_run, tiny_settings
from tests.waiting import wait_until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path)


@pytest.fixture
def folder(settings: Settings) -> RunFolder:
    """A run that has trained some batches."""
    folder = RunFolder(settings.run.folder)
    save(settings, folder.config)
    newest = rows()
    newest[-1]["time"] = time.time()
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in newest))
    shutil.copy(FOLDER.evaluations, folder.evaluations)
    shutil.copy(FOLDER.samples, folder.samples)
    return folder


@pytest.fixture
def run(folder: RunFolder) -> Iterator[LocalRun]:
    run = LocalRun(folder)
    yield run
    run.close()


def log_stage(folder: RunFolder, name: str, stage: str, at: float) -> None:
    path = folder.log(name)
    path.parent.mkdir(exist_ok=True)
    stamp = datetime.fromtimestamp(at, UTC).isoformat()
    with path.open("a") as file:
        file.write(json.dumps({"event": "starting", "stage": stage, "timestamp": stamp}) + "\n")


def test_a_run_is_seen_through_its_files_and_its_store(
    redis_url: str, settings: Settings, folder: RunFolder, run: LocalRun
) -> None:
    folder.redis_url.write_text(redis_url)
    with Store(redis_url, settings.run.name) as store:
        begin_run(store, settings.run)
        store.run(operations.actor_seen({"actor-7": {"host": "elsewhere", "capacity": "8"}}))

    wait_until(lambda: run.read_view().actors != ())

    view = run.read_view()
    assert (view.progress.step, view.is_training, view.alarm) == (47, True, None)
    assert [(actor.incarnation, actor.fields["host"]) for actor in view.actors] == [
        ("actor-7", "elsewhere")
    ]
    assert view.actors_alive == 1
    assert view.fill is not None
    per_batch = (settings.run.max_policy_lag + 1) * settings.run.groups_per_batch
    assert (view.fill.groups, view.fill.admitted) == (0, per_batch)
    assert view.sample is not None
    assert view.sample.prompt == "simaba>"


def test_a_learner_that_starts_again_is_seen_starting(folder: RunFolder, run: LocalRun) -> None:
    trained_at = json.loads(folder.metrics.read_text().splitlines()[-1])["time"]
    log_stage(folder, "learner", "waiting for episodes", trained_at - 10)
    log_stage(folder, "actor-0", "loading the engine", trained_at + 10)
    assert run.read_view().is_training

    log_stage(folder, "learner", "importing torch", trained_at + 10)

    view = run.read_view()
    assert not view.is_training
    assert view.stages == {"actor-0": "loading the engine", "learner": "importing torch"}


def test_a_run_that_nobody_keeps_up_is_not_mistaken_for_a_slow_one(
    folder: RunFolder, run: LocalRun
) -> None:
    alarm = stopped_line(folder, steps=tiny_settings(folder.path.parent).run.steps)
    assert run.read_view().alarm == run.read_view().alarm == alarm
    with folder.locked():
        assert run.read_view().alarm is None


def test_a_run_that_has_waited_for_actors_says_so(
    redis_url: str, settings: Settings, folder: RunFolder
) -> None:
    late = settings.model_copy(
        update={"console": settings.console.model_copy(update={"alarm_s": 0.5})}
    )
    save(late, folder.config)
    folder.redis_url.write_text(redis_url)
    with Store(redis_url, settings.run.name) as store:
        begin_run(store, settings.run)
        lineage = store.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        store.run(operations.claim(lineage, 1, 1, start=True))
    run = LocalRun(folder)
    try:
        wait_until(lambda: str(run.read_view().alarm).startswith("no actor was heard at all"))
    finally:
        run.close()


def test_the_newest_stage_is_read_from_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    log.write_text('{"stage": "old", "timestamp": "1970-01-01T00:00:01Z"}\nTraceback: "stage"\n')
    stage = newest_stage(log)
    assert stage is not None
    assert (stage.name, stage.at) == ("old", 1.0)

    with log.open("a") as file:
        file.write("x" * TAIL_BYTES + "\n")
    assert newest_stage(log) is None


def test_a_finished_run_is_shown_with_its_result(folder: RunFolder) -> None:
    folder.summary.write_text(json.dumps({"steps": 47}))

    answer = CliRunner().invoke(app, ["top", os.fspath(folder.path)])

    assert answer.exit_code == 0, answer.output
    assert "batch 47/" in answer.output
    assert "has finished" in answer.output
    assert "batches  47" in answer.output


def test_lines_are_printed_without_a_terminal_and_end_with_a_run_that_is_stopped(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "STOPPED_AFTER_S", 0.1)
    monkeypatch.setattr(top, "LOOK_EVERY_S", 0.01)

    answer = CliRunner().invoke(app, ["top", "--plain", os.fspath(folder.path)])

    assert answer.exit_code == 0, answer.output
    assert "batch 47/" in answer.output
    assert "ALARM not running: stopped since 20" in answer.output
    assert f"`nyala up {folder.path}`" in answer.output
    assert "has finished" not in answer.output


def test_a_run_that_is_kept_up_has_not_stopped(
    folder: RunFolder, run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "STOPPED_AFTER_S", 0.5)
    with folder.locked():
        assert not run.has_stopped
    wait_until(lambda: run.has_stopped)
    with folder.locked():
        assert not run.has_stopped


def test_the_first_line_waits_for_a_look_at_the_store(
    redis_url: str, settings: Settings, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_seen, look, ask = threading.Event(), LocalRun.read_view, ActorWatch._look

    def look_first(run: LocalRun) -> View:
        view = look(run)
        is_seen.set()
        return view

    def ask_later(watch: ActorWatch, store: Store) -> None:
        assert is_seen.wait(10)
        ask(watch, store)

    monkeypatch.setattr(LocalRun, "read_view", look_first)
    monkeypatch.setattr(ActorWatch, "_look", ask_later)
    folder.redis_url.write_text(redis_url)
    with Store(redis_url, settings.run.name) as store:
        begin_run(store, settings.run)
        store.run(operations.actor_seen({"actor-7": {"host": "elsewhere", "capacity": "8"}}))
        monkeypatch.setattr(LocalRun, "has_stopped", property(lambda run: run.has_looked))

        answer = CliRunner().invoke(app, ["top", "--plain", os.fspath(folder.path)])

    assert answer.exit_code == 0, answer.output
    (line,) = [each for each in answer.output.splitlines() if "batch 47/" in each]
    assert ", actors 1" in line
    assert "ALARM" not in answer.output  # not kept up from here, yet its store is there


def test_actors_that_nobody_has_counted_are_a_dash(
    redis_url: str, folder: RunFolder, run: LocalRun
) -> None:
    assert figures(run.read_view())["actors"] == "-"
    folder.redis_url.write_text(redis_url)

    first = run.read_view()
    if not run.has_looked:
        assert first.alarm is None
        assert wanted_actors(replace(first, progress=Progress(1, 2, actors_wanted=3))) == (
            "- (3 wanted)"
        )

    wait_until(lambda: figures(run.read_view())["actors"] == "0")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["top", os.fspath(tmp_path)])

    assert answer.exit_code == 2
    assert "must be the folder of a run" in answer.output
