"""A whole run that learns from a teacher alone, as a person starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.support.live_run import TORCH, LiveRun

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

NOTHING = "def nothing(completions, **_):\n    return [0.0] * len(completions)\n"
STEPS = 40


def test_the_demo_learns_from_a_trained_teacher_without_any_reward(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(NOTHING)
    teacher = _finished(tmp_path / "teacher", "run.steps=80", "run.eval_every=80")

    student = _finished(
        tmp_path / "student",
        f"run.steps={STEPS}",
        f"run.eval_every={STEPS}",
        f"run.reward={tmp_path}/nothing.py:nothing",
        "run.eval_metric=exact",
        f"algorithm.teacher={teacher.folder}/model",
        flags=("--method", "OPD"),
    )

    taught = teacher.lines("eval")[-1]["score"]
    before, after = (line["score"] for line in student.lines("eval"))
    rows = student.lines("metrics")
    assert {row["reward_mean"] for row in rows} == {0.0}
    assert before < 0.5
    assert after - before > 0.75 * (taught - before)
    assert rows[-1]["teacher_kl"] < 0.5 * rows[0]["teacher_kl"]
    assert not any(advice["rule"] == "reward_constant" for row in rows for advice in row["advice"])


def _finished(folder: Path, *overrides: str, flags: tuple[str, ...] = ()) -> LiveRun:
    folder.mkdir()
    run = LiveRun(folder, "demo.yaml", *TORCH, *overrides)
    with run.up(*flags) as process:
        run.finish(process, within_s=800)
    return run
