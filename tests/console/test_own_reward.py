"""What people see of a run: its own reward wherever it is shown or chosen by, rounded figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buffer.operations.values import ActorSeen
from configs.errors import SettingsError
from configs.loader import load
from console.display.live_view import live_view
from console.display.progress import RunProgress
from console.display.result import rows_of
from console.display.snapshot import View, figures
from console.main import app
from console.report.model_card import write_card
from console.run.run_folder import RunFolder
from console.sweep.grid import SweepPoint, outcome_of
from console.verbs.compare import compare
from console.verbs.status import _actor_line, _actor_lines
from learner.checkpointing.folders import best_of
from learner.reporting.journal import Journal, _held_out
from learner.reporting.run_snapshot import RunSnapshot
from learner.reporting.trackers.names import evaluation_figures
from tests.console.support.made_run import answers, made_run, write_lines

BEFORE, AFTER = 0.359, 0.812
REWARD = "rewards.py:number"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The environment's own part `exact` stays 0 while the reward rises."""
    folder: Path = made_run(tmp_path / "own", reward=REWARD, environment="calculator", steps=4)
    for step, reward in ((0, BEFORE), (2, 0.9), (4, AFTER)):
        row = {"step": step, "metric": "reward", "score": reward, "accuracy": None}
        figures = {"reward": reward, "parts": {"exact": 0.0, "number": reward}}
        write_lines(folder / "eval.jsonl", [row | figures])
    return folder


def test_the_live_view_lines_and_status_show_the_reward(run: Path) -> None:
    progress = RunProgress(RunFolder(run), steps=40).read_progress()
    view = View(progress, {}, 1)

    lines = [line.plain for line in live_view(view, name="own", width=100, height=30)]
    assert figures(view)["held-out reward"] == "0.812"
    assert "accuracy" not in figures(view)
    assert any(line.startswith("held out  0.812") and "0.359 before" in line for line in lines)
    assert any("judged by reward" in line for line in lines)
    assert "accuracy" not in "".join(lines)
    done = CliRunner().invoke(app, ["status", str(run)])
    assert "held-out reward 0.812" in done.output or "not running" in done.output


def test_an_observer_elsewhere_gets_the_same_from_the_run_snapshot(run: Path) -> None:
    journal = Journal(run)
    run_snapshot = RunSnapshot()
    for line in journal.lines("eval"):
        run_snapshot.add_evaluation(line)
    told = RunSnapshot.decode(run_snapshot.encode() or b"")

    assert told.evaluations == run_snapshot.evaluations
    assert told.scores.points == (BEFORE, 0.9, AFTER)


def test_the_table_at_the_end_names_the_reward(run: Path) -> None:
    settings = load(run / "config.yaml").run.model_copy(update={"steps": 4})
    summary = _held_out(settings, Journal(run).lines("eval"))

    rows = rows_of(summary)

    assert rows["held-out reward before"] == "0.359"
    assert rows["held-out reward after"] == "0.812"
    assert not any("accuracy" in label for label in rows)


def test_the_report_and_the_model_card_name_the_reward(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(run), "--output", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    (tmp_path / "model").mkdir()
    write_card(tmp_path / "model", load(run / "config.yaml"), 4)

    assert "held-out reward from 0.359 to 0.812" in text
    assert "best reward" in text
    assert "ccuracy" not in text
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| reward | 0.359 | 0.812 |" in card
    assert "ccuracy" not in card


def test_the_best_checkpoint_is_that_of_the_reward(run: Path) -> None:
    paths = [run / f"checkpoints/step-00000{step}" for step in (2, 4)]

    assert best_of(paths, Journal(run).scores()) == paths[0]


def test_scores_of_another_metric_do_not_choose_a_checkpoint(run: Path) -> None:
    """The metric was changed when the run was resumed."""
    line = {"step": 6, "metric": "number", "score": 0.1, "reward": 0.1}
    write_lines(run / "eval.jsonl", [line])

    assert Journal(run).scores() == {6: 0.1}


def test_a_sweep_and_trackers_get_the_reward(run: Path) -> None:
    outcome = outcome_of(SweepPoint("own", {}), run)
    line = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])

    assert (outcome.figure, outcome.judged_by) == (AFTER, "reward")
    assert outcome.row()["held out"] == "0.812"
    figures = evaluation_figures(line)
    assert figures["eval/score"] == figures["eval/reward"] == AFTER
    assert figures["eval/parts/exact"] == 0.0
    assert "eval/accuracy" not in figures


def _compared(folder: Path, grade: float, **settings: object) -> Path:
    made_run(folder, environment="calculator", **settings)
    parts = {"exact": 0.0, "number": grade}
    for question in ("x", "y", "z"):
        answers(
            folder,
            step=4,
            grades={question: grade},
            environment="calculator",
            parts=parts,
            reward=grade,
        )
    return folder


def test_runs_are_compared_by_the_reward_and_only_by_the_same(tmp_path: Path) -> None:
    a = _compared(tmp_path / "a", 0.25, reward=REWARD)
    b = _compared(tmp_path / "b", 0.75, reward=REWARD)
    other = _compared(tmp_path / "other", 0.75, reward="rewards.py:length")
    plain = _compared(tmp_path / "plain", 0.75)

    found = compare(a, b)
    assert (found.overall.first, found.overall.second) == (0.25, 0.75)
    assert found.sentences()[0].startswith("b is better than a: 0.750 against 0.250")
    for unlike in (other, plain):
        with pytest.raises(SettingsError, match=r"must be judged alike .* --metric exact"):
            compare(a, unlike)
    assert compare(a, plain, metric="number").overall.second == 0.75
    assert compare(a, plain, metric="exact").overall.second == 0.0


def test_status_says_how_actors_ended_and_counts_those_of_long_ago() -> None:
    seen = [
        ActorSeen("here", 1.0, {"host": "h"}),
        ActorSeen("left", 1.0, {"host": "h", "left": "1"}),
        ActorSeen("dead", 60.0, {"host": "h"}),
    ]

    present, left, dead = _actor_lines(seen, 6.0)
    assert present == "here on h, heard of 1 s ago, version none yet"
    assert left == "left on h, heard of 1 s ago, version none yet: drained and left"
    assert dead.endswith("heard of 1:00 min ago, version none yet: died or fell silent")
    old = [ActorSeen(f"old-{n}", 1800.0, {}) for n in range(7)]
    lines = _actor_lines([*seen, *old], 6.0)
    assert lines[3:] == [
        "actors that ended within the hour: 8 died or fell silent, 1 drained and left"
    ]


def test_figures_of_an_actor_are_rounded() -> None:
    fields = {
        "busy_s": "343.6846315036764",
        "memory_bytes": "7194070220.0",
        "span_s": "12345.678",
        "probe_max": "2.57492e-05",
    }
    line = _actor_line(
        ActorSeen("a", 1.0, {"host": "h", "tokens": "123456", "name": "x", **fields})
    )

    assert line == (
        "a on h, heard of 1 s ago, version none yet, busy_s 344, memory_gib 6.7, name x, "
        "probe_max 2.57e-05, span_s 12346, tokens 123456"
    )


def test_a_reward_that_is_the_accuracy_is_shown_once_by_that_name(tmp_path: Path) -> None:
    folder: Path = made_run(tmp_path / "same", environment="calculator", steps=4)
    for step, score in ((0, BEFORE), (4, AFTER)):
        row = {"step": step, "metric": "accuracy", "score": score, "accuracy": score}
        write_lines(folder / "eval.jsonl", [row | {"reward": score, "parts": {"exact": score}}])
    view = View(RunProgress(RunFolder(folder), steps=40).read_progress(), {}, 1)
    settings = load(folder / "config.yaml").run.model_copy(update={"steps": 4})
    page = folder / "page.html"
    done = CliRunner().invoke(app, ["report", str(folder), "--output", str(page)])

    assert done.exit_code == 0, done.output
    assert figures(view)["accuracy"] == "0.812"
    assert "held-out reward" not in figures(view)
    rows = rows_of(_held_out(settings, Journal(folder).lines("eval")))
    assert {name for name in rows if name.startswith("held-out")} == {
        "held-out accuracy before",
        "held-out accuracy after",
    }
    assert "held-out reward" not in page.read_text()


def test_a_reward_that_only_begins_as_the_accuracy_is_shown_at_both_ends(tmp_path: Path) -> None:
    folder: Path = made_run(tmp_path / "shaped", environment="calculator", steps=4)
    for step, score, reward in ((0, 0.0, 0.0), (4, 0.5, 0.7)):
        row = {"step": step, "metric": "accuracy", "score": score, "accuracy": score}
        write_lines(folder / "eval.jsonl", [row | {"reward": reward}])
    settings = load(folder / "config.yaml").run.model_copy(update={"steps": 4})
    (folder / "model").mkdir()
    write_card(folder / "model", load(folder / "config.yaml"), 4)

    rows = rows_of(_held_out(settings, Journal(folder).lines("eval")))

    assert (rows["held-out reward before"], rows["held-out reward after"]) == ("0.000", "0.700")
    assert "| reward | 0.000 | 0.700 |" in (folder / "model" / "README.md").read_text()
