"""Run snapshots: bounded, the same from files and over the wire, true after a rewind."""

import json

import pytest

from configs.errors import RecordError
from console.display.progress import RunProgress, progress_of
from learner.reporting.journal import Journal
from learner.reporting.run_snapshot import MAX_BYTES, RECENT, RunSnapshot
from tests.console.support.recorded_run import FOLDER, rows


def recorded():
    run_snapshot = RunSnapshot()
    for row in rows():
        run_snapshot.add_batch(row)
    for row in rows("eval"):
        run_snapshot.add_evaluation(row)
    return run_snapshot


def sent(run_snapshot):
    text = run_snapshot.encode()
    assert text is not None
    return text


def test_it_says_over_the_wire_what_the_files_say():
    from_files = RunProgress(FOLDER, steps=120).read_progress()

    told = progress_of(RunSnapshot.decode(sent(recorded())), steps=120)

    for name in ("step", "reward", "held_out", "held_out_before", "tokens_per_s", "policy_lag"):
        assert getattr(told, name) == getattr(from_files, name)
    assert (told.phases, told.dropped, told.eta_s) == (
        from_files.phases,
        from_files.dropped,
        from_files.eta_s,
    )
    assert told.rewards == pytest.approx(from_files.rewards, abs=1e-4)
    assert told.score_curve == pytest.approx(from_files.score_curve, abs=1e-4)


@pytest.mark.slow
def test_it_has_the_newest_batches_alone_however_long_the_run_is():
    run_snapshot = RunSnapshot()
    advice = [{"rule": "r", "text": "x" * 1000}]
    for step in range(1, 20_000):
        run_snapshot.add_batch(
            {"step": step, "advice": advice, "episodes_by_actor": {"a" * 99: 1}}
            | dict(rows()[0], step=step)
        )
        run_snapshot.add_evaluation({"step": step, "accuracy": 0.5})

    told = json.loads(sent(run_snapshot))
    assert [batch["step"] for batch in told["batches"]] == list(range(20_000 - RECENT, 20_000))
    assert [row["step"] for row in told["evaluations"]] == [1, 19_999]
    assert ["advice" in batch for batch in told["batches"]] == [False] * (RECENT - 1) + [True]
    assert "episodes_by_actor" not in told["batches"][0]
    assert len(sent(run_snapshot)) < MAX_BYTES / 2


def test_one_that_is_too_large_is_left_out():
    run_snapshot = recorded()
    run_snapshot.add_batch({"step": 48, "advice": [{"rule": "r", "text": "x" * MAX_BYTES}]})

    assert run_snapshot.encode() is None


def test_other_bytes_are_refused():
    for text in (
        b"",
        b"\xff",
        b"[]",
        b'{"batches": [1], "evaluations": [], "rewards": [], "scores": []}',
    ):
        with pytest.raises(
            RecordError, match="a run snapshot must be one that a learner of this release"
        ):
            RunSnapshot.decode(text)


def test_a_learner_that_resumes_takes_back_what_it_has_said(tmp_path):
    journal = Journal(tmp_path)
    for row in rows():
        journal.append("metrics", row)
    for row in rows("eval"):
        journal.append("eval", row)
    assert progress_of(journal.run_snapshot, steps=120).step == 47

    again = Journal(tmp_path)
    again.rewind(25)

    told = progress_of(again.run_snapshot, steps=120)
    assert (told.step, len(told.rewards), len(told.score_curve)) == (25, 25, 3)
