"""`nyala sweep`: runs with stand-ins for the roles, made once, gone on with, and summed up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console import api
from console.main import app
from console.run.run_folder import RunFolder
from console.sweep.grid import grid as grid_of
from console.sweep.grid import outcome_of, parse_axis, ranked
from console.sweep.page import write_sweep
from console.sweep.sweep import Sweep
from tests.console.support.made_run import answers, made_run
from tests.console.support.stand_in_up import MODULE
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
SETTINGS = """
run: {{name: r, directory: "{directory}", model: init, environment: calculator, steps: 3}}
broker: {{endpoint: "tcp://127.0.0.1:0"}}
actors: {{count: 1, engine: torch}}
console: {{refresh_s: 0.05, stop_timeout_s: 5}}
"""
INTERRUPTIBLE = """
import sys
from tests.console.support.stand_in_up import use_stand_ins
use_stand_ins()
from console.main import app
app(sys.argv[1:])
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("NYALA_REDIS_URL", raising=False)
    monkeypatch.setattr(api, "UP", (*MODULE, "{}"))
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mine.yaml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return path


def sweep(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


@pytest.mark.live
def test_runs_are_made_once_and_more_values_make_more_runs(config, tmp_path):
    first = sweep(config, "--over", "learner.lr=1e-6,3e-6", "--jobs", 2)

    folder = tmp_path / "r-sweep"
    assert first.exit_code == 0, first.output
    assert f"2 runs in {folder}" in first.output
    assert "finished already" not in first.output
    made = [folder / name / "summary.json" for name in ("r-lr_1e-6", "r-lr_3e-6")]
    written = [path.stat().st_mtime_ns for path in made]

    again = sweep(config, "--over", "learner.lr=3e-6,1e-5,1e-6")

    assert again.exit_code == 0, again.output
    assert "3 runs in" in again.output
    assert again.output.count("has finished already") == 2
    assert "run 2 of 3: nyala top" in again.output
    assert [path.stat().st_mtime_ns for path in made] == written
    assert (folder / "r-lr_1e-5" / "report.html").exists()
    assert "r-lr_1e-5" in (folder / "sweep.html").read_text()

    other = sweep(config, "--over", "learner.lr=1e-6", "--set", "run.group_size=4")

    assert other.exit_code == 2
    assert "the runs of a sweep must keep the settings they were begun with" in other.stderr
    assert "$.run.group_size was 8, got 4" in other.stderr


def test_runs_that_are_judged_unlike_are_not_ranked_without_a_word(config, tmp_path):
    for name in ("short", "long"):
        (tmp_path / f"{name}.py").write_text("def score(completion): return 1.0")
    rewards = [str(tmp_path / f"{name}.py:score") for name in ("short", "long")]

    def doubt(*points, overrides=()):
        axes = [parse_axis(each) for each in points]
        found = Sweep(config, overrides, axes, tmp_path / "s")
        return found._unlike(grid_of(axes, base="r"))

    by_reward = f"run.reward={','.join(rewards)}"
    assert doubt("learner.lr=1e-6,3e-6") is None
    assert doubt(by_reward, overrides=["run.eval_metric=exact"]) is None
    assert "judged alike to be ranked, got the reward (" in doubt(by_reward)
    assert doubt("rewards.weights={exact: 1.0},{exact: 1.0, tool: 0.5}") is None  # both by exact
    assert "1 x tool" in doubt("rewards.weights={tool: 1.0},{tool: 1.0, long: -0.5}")
    assert "on sorting" in doubt("run.environment=calculator,sorting")
    assert "exact on calculator, the reward" in doubt("run.eval_metric=exact,reward")


@pytest.mark.live
def test_a_run_that_fails_does_not_end_the_others(config, monkeypatch):
    monkeypatch.setattr(api, "UP", (*MODULE, '{"learner": "refuses"}'))

    done = sweep(config, "--over", "run.seed=1,2")

    assert done.exit_code == 1
    assert done.output.count("has failed; ") == 2
    assert "run.reward must be good, got bad" in done.output
    assert done.output.count("unfinished") == 2


@pytest.mark.live
def test_an_interrupted_sweep_stops_its_runs_in_order(config, tmp_path):
    folder = tmp_path / "r-sweep" / "r-seed_1"
    command = [sys.executable, "-c", INTERRUPTIBLE, "sweep", str(config)]
    command += ["--over", "run.seed=1,2", "--set", "run.steps=2000"]
    with subprocess.Popen(command, stdout=-1, text=True, cwd=ROOT) as program:
        wait_until((folder / "metrics.jsonl").exists)

        os.kill(program.pid, signal.SIGINT)
        out, _ = program.communicate(timeout=60)

    assert program.returncode == 130
    assert "stopped; run the same command again to continue" in out
    assert not RunFolder(folder).is_held
    assert "stopping: actors drain" in (folder.parent / ".r-seed_1.up.log").read_text()
    assert not (folder.parent / "r-seed_2").exists()


@pytest.mark.live
def test_a_search_goes_on_where_it_was(config, tmp_path):
    over = ["--over", "learner.lr=1e-7..1e-4", "--over", "run.group_size=4,8"]

    first = sweep(config, *over, "--trials", 2, "--jobs", 2)
    again = sweep(config, *over, "--trials", 3)

    assert first.exit_code == 0, first.output
    assert again.exit_code == 0, again.output
    assert "run 1 of 3: nyala top" in again.output
    assert "run 2 of 3" not in again.output
    assert again.output.count("finished") == 3
    assert len([path for path in (tmp_path / "r-sweep").iterdir() if path.is_dir()]) == 3


def test_a_range_is_refused_in_a_grid_and_checked_in_a_search(config, tmp_path):
    grid = sweep(config, "--over", "learner.lr=1e-7..1e-4")
    search = sweep(config, "--over", "learner.lr=-1..1e-4", "--trials", 2)

    assert (grid.exit_code, search.exit_code) == (2, 2)
    assert "must come with --trials" in grid.stderr
    assert "learner.lr" in search.stderr
    assert not (tmp_path / "r-sweep").exists()


def test_wrong_values_are_refused_before_a_run_starts(config, tmp_path):
    done = sweep(config, "--over", "learner.lr=1e-6,-1")

    assert done.exit_code == 2
    assert "learner.lr" in done.stderr
    assert not (tmp_path / "r-sweep").exists()


def test_the_best_run_comes_first_and_the_page_has_all(tmp_path):
    axis = parse_axis("learner.lr=1e-6,3e-6,1e-5,</script>")
    outcomes = []
    for point, accuracy in zip(grid_of([axis], base="r"), (0.5, 0.75, 0.25, None), strict=True):
        folder = made_run(tmp_path / point.name)
        if accuracy is not None:
            answers(folder, step=0, grades={"x": 0.0})
            answers(folder, step=4, grades={"x": accuracy})
        outcomes.append(outcome_of(point, folder))

    assert [each.held_out for each in ranked(outcomes)][:3] == [0.75, 0.5, 0.25]
    assert ranked(outcomes)[0].row() == {
        "run": "r-lr_3e-6",
        "learner.lr": "3e-6",
        "held out": "0.750",
        "of": "accuracy",
        "best": "0.750 (4)",
        "reward": "0.357",
        "batches": "4",
        "time": "6 s",
        "state": "unfinished",
    }
    text = write_sweep(tmp_path / "sweep.html", "mine", [axis], outcomes).read_text()
    assert "</script>" not in text
    assert text.count('<path class="dots c0 d0"') == 3
    assert "learner.lr 3e-6: 0.75; learner.lr 1e-6: 0.5; learner.lr 1e-5: 0.25" in text
